// Texts of conversations in this browser (IndexedDB). The service stores states, no texts.

const NAME = "rwkv-conversations";
const STORE = "conversations";

const finished = (wish) =>
  new Promise((resolve, reject) => {
    wish.onsuccess = () => resolve(wish.result);
    wish.onerror = () => reject(wish.error);
  });

let opening = null;
function database() {
  opening ??= (() => {
    const wish = indexedDB.open(NAME, 1);
    wish.onupgradeneeded = () => wish.result.createObjectStore(STORE, { keyPath: "id" });
    return finished(wish);
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
