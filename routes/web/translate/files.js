// Files to translate, each with its progress and its result. Those that were sent are found again after a reload.

import { number, t } from "../i18n.js";
import { createStore, download, html, settings, useEffect, useStore } from "../ui.js";
import { glossaryFields } from "./glossary.js";
import { languageName } from "./languages.js";
import { contentOf, deleteDocument, followDocument, sendFile } from "./work.js";

const ENDINGS = (
  "docx pptx xlsx odt epub txt md html tex srt vtt ass po pot xlf xliff tmx tbx json arb yaml yml xml xcstrings properties strings csv tsv"
).split(" ");
/** Other endings of the same formats. */
const ALIASES = "text markdown htm xhtml latex ltx ssa tab".split(" ");
const TAKEN = [...ENDINGS, ...ALIASES];

export const ACCEPTED = TAKEN.map((ending) => `.${ending}`).join(",");
export const LISTED_ENDINGS = ENDINGS.join(", ");
const SETTING = "files";
let lastKey = 0;

/** A file: `file` until it is sent, then `id`, and `document` as the service describes it. */
const entry = (given) => ({ key: ++lastKey, state: "waiting", document: {}, problem: "", control: new AbortController(), ...given });

function kept() {
  try {
    return JSON.parse(settings.get(SETTING)).map(({ id, name, target }) => entry({ id: String(id), name: String(name), target: String(target), state: "sent" }));
  } catch {
    return [];
  }
}

const all = createStore(kept());
all.subscribe((now) => settings.set(SETTING, JSON.stringify(now.filter((one) => one.id).map(({ id, name, target }) => ({ id, name, target })))));

const change = (one, changes) => {
  Object.assign(one, changes);
  all.set((now) => [...now]);
};

const remove = (one) => {
  one.control.abort();
  if (one.id) deleteDocument(one.id);
  all.set((now) => now.filter((other) => other !== one));
};

/** Send a file unless it was sent, and wait for its translation. */
async function run(one, source, target) {
  change(one, { state: "running", target });
  const { signal } = one.control;
  try {
    if (!one.id) {
      const document = await sendFile(one.file, source, target, glossaryFields(), signal);
      change(one, { id: document.id, document });
    }
    const found = await followDocument(one.id, signal, (document) => change(one, { document }));
    change(one, { state: found.error ? "error" : "done", problem: found.error });
  } catch (error) {
    if (error.name === "AbortError") return;
    change(one, { state: "error", problem: error.message || t("notice.offline") });
  }
}

/** The files: `add(files)`, `start(source, target)` translates those that wait, one after another. */
export function useFiles() {
  const files = useStore(all);
  useEffect(() => {
    for (const one of all.get().filter((file) => file.state === "sent")) run(one, "", one.target);
  }, []);
  const unsent = files.some((one) => !one.id && one.state !== "error");
  useEffect(() => {
    if (!unsent) return undefined;
    const warn = (event) => event.preventDefault(); // the browser asks whether to leave
    addEventListener("beforeunload", warn);
    return () => removeEventListener("beforeunload", warn);
  }, [unsent]);
  const add = (given) => all.set((now) => [...now, ...[...given].map((file) => {
    const isKnown = TAKEN.includes(file.name.split(".").at(-1).toLowerCase());
    return entry({ file, name: file.name, ...(!isKnown && { state: "error", problem: t("file.type", { name: file.name, endings: LISTED_ENDINGS }) }) });
  })]);
  const start = async (source, target) => {
    for (const one of all.get().filter((file) => file.state === "waiting")) await run(one, source, target);
  };
  return { all: files, add, start };
}

function Chip({ one }) {
  const { name, id, state, target, document, problem } = one;
  const { filename, texts = 0, translated = 0, failed = 0, notes = [], doubtful = [] } = document;
  const save = () => contentOf(id).then((content) => download(filename, content), (error) => change(one, { problem: error.message || t("notice.offline") }));
  return html`<li class="row chip" data-state=${state}><b>${name}</b>
    ${state === "running" && html`<progress max=${texts || 1} value=${translated + failed} aria-label=${`${t("translate.progress")} ${name}`}></progress>
      ${texts > 0 && html`<small>${t("translate.paragraphs", { done: number(translated + failed), count: number(texts) })}</small>`}`}
    ${state === "waiting" && html`<small>${t("file.waiting")}</small>`}
    ${state === "done" && html`<small>${[languageName(target), ...notes].join(", ")}</small>
      ${failed > 0 && html`<span class="bad">${t("translate.failed", { count: number(failed) })}</span>`}
      <button onClick=${save} aria-label=${`${t("translate.download")} ${filename}`}>${t("translate.download")}</button>`}
    ${problem && html`<span class="bad" role="alert">${problem.includes(name) ? problem : `${name}: ${problem}`}</span>`}
    <button class="plain" onClick=${() => remove(one)} aria-label=${`${t("file.remove")} ${name}`}>✕</button>
    ${doubtful.length > 0 && html`<details><summary>${t("translate.warnings", { count: number(doubtful.length) })}</summary>
      <ul>${doubtful.map(({ text, translation, warning }) => html`<li>${text} → ${translation} <small class="warning">${warning}</small></li>`)}</ul></details>`}</li>`;
}

/** The files as a list. */
export function Chips({ files }) {
  return files.all.length > 0 && html`<ul class="plainlist" id="files">${files.all.map((one) => html`<${Chip} key=${one.key} one=${one} />`)}</ul>`;
}
