// Texts of conversations in this browser (IndexedDB). The service stores states, no texts.

const NAME = "rwkv-conversations";
const STORE = "conversations";

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let opening = null;
function database() {
  opening ??= (() => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    return finished(request);
  })();
  return opening;
}

async function inStore(mode, act) {
  return finished(act((await database()).transaction(STORE, mode).objectStore(STORE)));
}

/** All conversations. */
export const load = () => inStore("readonly", (store) => store.getAll());
export const save = (conversation) => inStore("readwrite", (store) => store.put(conversation));
export const remove = (id) => inStore("readwrite", (store) => store.delete(id));
