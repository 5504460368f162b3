// One row of the translation: source and target beside each other, warnings, the editor with alternatives.

import { t } from "../i18n.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { underlined } from "./glossary.js";
import { alternativesOf, remember } from "./segments.js";

/** `end(saved)`: after the editor is closed. */
function Editor({ segment, options, end }) {
  const field = useRef();
  const [text, setText] = useState(segment.target);
  const [others, setOthers] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    field.current.focus();
    alternativesOf(segment, options).then(setOthers, () => setOthers([]));
  }, []);
  const save = async (event) => {
    event?.preventDefault();
    if (!text.trim()) return;
    Object.assign(segment, { target: text, isEdited: true, origin: "memory", warnings: [] });
    try {
      await remember(segment, segment.language || options.source, options.target);
      end(true);
    } catch (error) {
      segment.origin = "";
      setProblem(error.message || t("notice.offline"));
    }
  };
  const key = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(event);
    else if (event.key === "Escape") end(false);
    else return;
    event.stopPropagation();
  };
  return html`<form class="segment-editor" onSubmit=${save} onKeyDown=${key}>
    <textarea ref=${field} rows="3" aria-label=${t("translate.target")} lang=${options.target} value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea>
    <ul class="plainlist alternatives" aria-label=${t("segment.alternatives")}>${others === null
      ? html`<li><small>${t("segment.loading")}</small></li>`
      : !others.length ? html`<li><small>${t("segment.none")}</small></li>` : others.map((other) => html`<li><button type="button" class="plain" lang=${options.target} onClick=${() => setText(other)}>${other}</button></li>`)}</ul>
    <p class="row"><button class="main">${t("segment.keep")}</button> <button type="button" onClick=${() => end(false)}>${t("cancel")}</button></p>
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
  </form>`;
}

/** `isCurrent`: the row of the keyboard. `isOpen`: its editor is shown. */
export function Segment({ segment, index, patterns, options, isCurrent, isOpen, choose, end }) {
  return html`<div class="segment${isCurrent ? " current" : ""}" onMouseDown=${() => isOpen || choose(index, false)}>
    <div class="source" lang=${segment.language}>${underlined(segment.source.trim(), patterns.source)}</div>
    <div class="target">${isOpen
      ? html`<${Editor} segment=${segment} options=${options} end=${end} />`
      : segment.target === null
        ? html`<span class="quiet">…</span>`
        : html`<button class="plain" lang=${options.target} aria-current=${isCurrent ? "true" : null} onClick=${() => choose(index, true)}>${underlined(segment.target.trim(), patterns.target)}</button>`}
      ${segment.origin === "memory" && html`<small class="origin">${t("segment.memory")}</small>`}
      ${segment.warnings.map((message) => html`<small class="warning">⚠ ${message}</small>`)}
    </div></div>`;
}
