// Files to translate, each with its progress and its result.

import { number, t } from "../i18n.js";
import { download, html, useEffect, useRef, useState, useStore } from "../ui.js";
import { glossary } from "./glossary.js";
import { languageName } from "./languages.js";
import { translateFile } from "./work.js";

const BINARY = ["docx", "pptx", "xlsx", "odt", "epub"];
const ENDINGS = [
  ...BINARY, "txt", "md", "html", "srt", "vtt", "ass", "po", "pot", "xlf", "xliff", "tmx", "tbx", "json", "arb", "yaml", "yml",
  "xml", "xcstrings", "properties", "strings", "csv", "tsv",
];

export const ACCEPTED = ENDINGS.map((ending) => `.${ending}`).join(",");
export const LISTED_ENDINGS = ENDINGS.join(", ");
let lastId = 0;

/** The files: `add(files)`, `start(source, target)` translates those that wait, one after another; `remove(file)`; `save(file)`. */
export function useFiles() {
  const [, redraw] = useState(0);
  const all = useRef([]);
  const changed = () => redraw((times) => times + 1);
  const add = (files) => {
    all.current = [...all.current, ...[...files].map((file) => ({ id: ++lastId, file, state: "waiting", done: 0, count: 0, control: new AbortController() }))];
    changed();
  };
  const remove = (one) => {
    one.control.abort();
    all.current = all.current.filter((other) => other !== one);
    changed();
  };
  const run = async (one, source, target) => {
    Object.assign(one, { state: "running", target });
    changed();
    try {
      const { content, filename, failed, doubtful } = await translateFile(one.file, source, target, glossary.get().stored, one.control.signal, (found) => {
        Object.assign(one, { done: found.translated + found.failed, count: found.texts });
        changed();
      });
      Object.assign(one, { state: "done", content, filename, doubtful, problem: failed ? t("translate.failed", { count: number(failed) }) : "" });
    } catch (error) {
      Object.assign(one, { state: "error", problem: error.message || t("notice.offline") });
    }
    changed();
  };
  const start = async (source, target) => {
    for (const one of all.current.filter((file) => file.state === "waiting")) await run(one, source, target);
  };
  const unsaved = all.current.some((one) => ["running", "done"].includes(one.state) && !one.saved);
  useEffect(() => {
    if (!unsaved) return undefined;
    const warn = (event) => event.preventDefault(); // the browser asks whether to leave
    addEventListener("beforeunload", warn);
    return () => removeEventListener("beforeunload", warn);
  }, [unsaved]);
  const save = (one) => {
    one.saved = true;
    download(one.filename, one.content);
    changed();
  };
  return { all: all.current, add, start, remove, save };
}

function Chip({ one, remove, save }) {
  const { file, state, done, count, problem, target } = one;
  return html`<li class="row chip" data-state=${state}><b>${file.name}</b>
    ${state === "running" && html`<progress max=${count || 1} value=${count ? done : 0} aria-label=${`${t("translate.progress")} ${file.name}`}></progress>
      ${count > 0 && html`<small>${t("translate.paragraphs", { done: number(done), count: number(count) })}</small>`}`}
    ${state === "waiting" && html`<small>${t("file.waiting")}</small>`}
    ${state === "done" && html`<small>${languageName(target)}</small> <button onClick=${() => save(one)} aria-label=${`${t("translate.download")} ${one.filename}`}>${t("translate.download")}</button>`}
    ${problem && html`<span class="bad" role="alert">${problem.includes(file.name) ? problem : `${file.name}: ${problem}`}</span>`}
    <button class="plain" onClick=${() => remove(one)} aria-label=${`${t("file.remove")} ${file.name}`}>✕</button>
    ${one.doubtful?.length > 0 && html`<details><summary>${t("translate.warnings", { count: number(one.doubtful.length) })}</summary>
      <ul>${one.doubtful.map(({ text, translation, warning }) => html`<li>${text} → ${translation} <small class="warning">${warning}</small></li>`)}</ul></details>`}</li>`;
}

/** The files as a list, with a note if the terms of this browser will not be used for them. */
export function Chips({ files }) {
  const { terms, stored } = useStore(glossary);
  if (!files.all.length) return null;
  const lacksTerms = terms.length > 0 && !stored && files.all.some((one) => one.state === "waiting");
  return html`<ul class="plainlist" id="files">${files.all.map((one) => html`<${Chip} key=${one.id} one=${one} remove=${files.remove} save=${files.save} />`)}</ul>
    ${lacksTerms && html`<p id="files-glossary" class="warning" role="status">${t("file.noTerms")}</p>`}`;
}
