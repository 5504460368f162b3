// The last translated texts of this browser.

import { locale, t } from "../i18n.js";
import { createStorage } from "../storage.js";
import { html, useEffect, useState } from "../ui.js";
import { languageName } from "./languages.js";

const KEPT = 20;
const storage = createStorage("rwkv-translations", "translations");
const byTime = (one, other) => other.id - one.id;

/** Keep a translation {source, target, text, translation}. Forget the oldest ones, and earlier ones of the same text. */
export async function keepInHistory(entry) {
  const isSame = (one) => one.text === entry.text && one.target === entry.target;
  const others = (await storage.load().catch(() => [])).sort(byTime);
  await storage.save({ id: Date.now(), ...entry }).catch(() => {});
  for (const [at, one] of others.entries()) if (at >= KEPT - 1 || isSame(one)) await storage.remove(one.id).catch(() => {});
}

/** The list. `open(entry)` shows one again. `changes`: the list is loaded again when it changes. */
export function History({ open, changes }) {
  const [entries, setEntries] = useState([]);
  const load = () => storage.load().then((all) => setEntries(all.sort(byTime)), () => {});
  useEffect(() => {
    load();
  }, [changes]);
  if (!entries.length) return null;
  const clear = () => Promise.all(entries.map((entry) => storage.remove(entry.id))).then(load);
  const when = (entry) => new Date(entry.id).toLocaleString(locale(), { dateStyle: "short", timeStyle: "short" });
  return html`<details id="history"><summary>${t("history.title")}</summary>
    <ul class="plainlist">${entries.map((entry) => html`<li key=${entry.id}><button class="plain" onClick=${() => open(entry)}>${entry.text.trim().slice(0, 80)}</button>
      <small>${when(entry)} · ${languageName(entry.target)}</small></li>`)}</ul>
    <button onClick=${clear}>${t("history.clear")}</button></details>`;
}
