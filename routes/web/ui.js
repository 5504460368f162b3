// Preact with htm, and stores for shared state.

import { h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** Shared state: `get`, `set(value | change)`, `subscribe(listener) -> unsubscribe`. */
export function createStore(value) {
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      value = typeof next === "function" ? next(value) : next;
      for (const listener of [...listeners]) listener(value);
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/** Return a store's value. The component renders again when it changes. */
export function useStore(store) {
  const [, rerender] = useState(0);
  useLayoutEffect(() => store.subscribe(() => rerender((count) => count + 1)), [store]);
  return store.get();
}

/** Call `load` at once and every `ms` milliseconds while `active`, and again when `subject` changes. */
export function usePolling(load, ms, active, subject) {
  useEffect(() => {
    if (!active) return undefined;
    load();
    const timer = setInterval(load, ms);
    return () => clearInterval(timer);
  }, [active, subject]);
}

/** Handlers that pass one file to `take`: `choose` of an input, and `target` of an element that takes a dropped one. */
export function fileHandlers(take) {
  const choose = (event) => {
    const [one] = event.currentTarget.files;
    if (one) take(one);
    event.currentTarget.value = ""; // so that a corrected file can be chosen again
  };
  const onDrop = (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  };
  return { choose, target: { onDrop, onDragOver: (event) => event.preventDefault() } };
}

/** A select with its label. `text(name)` is shown for each of the `names`. */
export const choice = (id, label, value, choose, names, text) =>
  html`<label>${label} <select id=${id} value=${value} onChange=${(event) => choose(event.currentTarget.value)}>
    ${names.map((one) => html`<option value=${one} selected=${one === value}>${text(one)}</option>`)}</select></label>`;

/** Limit `act` to one call per frame. */
export function oncePerFrame(act) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      act();
    });
  };
}

/** Download `content` (text or Blob) as a file. */
export function download(name, content, type = "text/plain;charset=utf-8") {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** A setting stored in this browser. null without storage. */
export const settings = {
  get(name) {
    try {
      return localStorage.getItem(`rwkv.${name}`);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`rwkv.${name}`, value);
    } catch {
      // without storage, the setting is lost with the page
    }
  },
};
