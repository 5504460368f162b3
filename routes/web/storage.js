// Objects with an `id` in this browser (IndexedDB).

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** A database with one store: `load()` all, `save(object)`, `remove(id)`. They fail without storage, as in a private window. */
export function createStorage(name, store) {
  let opening = null;
  const database = () => {
    opening ??= (() => {
      const request = indexedDB.open(name, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(store, { keyPath: "id" });
      return finished(request);
    })();
    return opening;
  };
  const inStore = async (mode, act) => finished(act((await database()).transaction(store, mode).objectStore(store)));
  return {
    load: () => inStore("readonly", (all) => all.getAll()),
    save: (object) => inStore("readwrite", (all) => all.put(object)),
    remove: (id) => inStore("readwrite", (all) => all.delete(id)),
  };
}
