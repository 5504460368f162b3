// Glossaries that the service stores for this key: one is used by name, in texts and in files.

import { json, post, request } from "../api.js";
import { t } from "../i18n.js";
import { html, useState, useStore } from "../ui.js";
import { glossary, glossaryFields } from "./glossary.js";
import { AUTO } from "./languages.js";

const PATH = "/translate/v1/glossaries";

const describe = ({ name, dictionaries }) =>
  `${name} (${dictionaries.map((one) => `${one.source_lang} → ${one.target_lang}: ${one.entry_count}`).join(", ")})`;

/** Chooses a stored glossary, stores the terms of this browser, and deletes one. */
export function StoredGlossaries({ source, target }) {
  const { terms, stored } = useStore(glossary);
  const [all, setAll] = useState([]);
  const [name, setName] = useState("");
  const [problem, setProblem] = useState("");
  const choose = (id) => glossary.set((now) => ({ ...now, stored: id }));
  const guarded = (work) => {
    setProblem(""); // not at the end: another call may have failed meanwhile
    return work().catch((error) => setProblem(error.message || t("notice.offline")));
  };
  const load = async (wanted) => {
    const { glossaries } = await json(PATH);
    setAll(glossaries);
    choose(glossaries.some((one) => one.glossary_id === wanted) ? wanted : "");
  };
  const store = (event) => {
    event.preventDefault();
    guarded(async () => {
      if (source === AUTO) throw new Error(t("glossary.noSource"));
      const dictionary = { source_lang: source, target_lang: target, entries: glossaryFields().glossary };
      const { glossary_id: id } = await post(PATH, { name: name.trim(), dictionaries: [dictionary] });
      setName("");
      await load(id);
    });
  };
  const remove = () => guarded(async () => {
    if (!confirm(t("admin.confirm", { name: all.find((one) => one.glossary_id === stored)?.name ?? stored }))) return;
    await request(`${PATH}/${encodeURIComponent(stored)}`, { method: "DELETE" });
    await load("");
  });
  return html`<details id="stored-glossaries" onToggle=${(event) => event.currentTarget.open && guarded(() => load(stored))}><summary>${t("glossary.stored")}</summary>
    <p><small>${t("glossary.storedAbout")}</small></p>
    <p class="row"><select id="stored-glossary" aria-label=${t("glossary.stored")} value=${stored} onChange=${(event) => choose(event.currentTarget.value)}>
      <option value="" selected=${!stored}>${t("decode.noState")}</option>
      ${all.map((one) => html`<option key=${one.glossary_id} value=${one.glossary_id} selected=${one.glossary_id === stored}>${describe(one)}</option>`)}</select>
      ${stored && html`<button onClick=${remove}>${t("admin.do.remove")}</button>`}</p>
    ${terms.length > 0 && html`<form class="row term-row" onSubmit=${store}>
      <input id="store-glossary" required maxlength="100" aria-label=${t("glossary.storeAs")} placeholder=${t("glossary.storeAs")} value=${name} onInput=${(event) => setName(event.currentTarget.value)} />
      <button>${t("glossary.store")}</button></form>`}
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
  </details>`;
}
