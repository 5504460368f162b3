// The translation panel: a text as aligned segments, files, glossary, history, and settings for immersive-translate.

import { number, t, useLanguage } from "../i18n.js";
import { VirtualList } from "../list.js";
import { isDemo, service } from "../monitor.js";
import { download, html, oncePerFrame, settings, useMemo, useRef, useState, useStore } from "../ui.js";
import { ACCEPTED, Chips, LISTED_ENDINGS, useFiles } from "./files.js";
import { glossary, GlossaryEditor, glossaryFields, patternsOf } from "./glossary.js";
import { History, keepInHistory } from "./history.js";
import { AUTO, LanguageChoice, languageName, LANGUAGES } from "./languages.js";
import { ImmersiveTranslate } from "./plugin.js";
import { Segment } from "./segment.js";
import { segmented, translateSegments } from "./segments.js";
import { StoredGlossaries } from "./stored.js";

const MAX_WARNINGS = 200;
const ROW_PX = 48;

/** The translated text: {segments, assemble, done, ended, problem, languages, options, control}, or null. */
function useTranslation() {
  const [state, setState] = useState(null);
  const start = async (text, source, target) => {
    const control = new AbortController();
    const options = { source, target, ...glossaryFields(), signal: control.signal };
    const now = { ...segmented(text), text, done: 0, ended: false, problem: "", languages: new Map(), options, control };
    const show = oncePerFrame(() => setState({ ...now }));
    show();
    try {
      await translateSegments(now.segments, options, ({ language }) => {
        now.done += 1;
        now.languages.set(language, (now.languages.get(language) ?? 0) + 1);
        show();
      });
    } catch (error) {
      now.problem = error.name === "AbortError" ? t("translate.stopped") : error.message || t("notice.offline");
    }
    now.ended = true;
    show();
    if (!now.problem) await keepInHistory({ source, target, text, translation: now.assemble() });
    show();
  };
  return [state, start, () => setState(null)];
}

/** The detected languages, most frequent first. */
const detected = (languages) => [...languages].sort((one, other) => other[1] - one[1]).map(([code]) => code);

function Progress({ state, goTo }) {
  const warnings = state.segments.flatMap((one, at) => one.warnings.map((message) => ({ at, message })));
  const names = detected(state.languages).map(languageName);
  return html`<p class="row" id="translate-progress" data-ended=${state.ended} role="status">
    <progress max=${state.segments.length || 1} value=${state.segments.length ? state.done : 1} aria-label=${t("translate.progress")}></progress>
    <span>${t("translate.paragraphs", { done: number(state.done), count: number(state.segments.length) })}
      ${names.length > 0 && html` · ${t("translate.detected")} <b id="detected">${names.join(", ")}</b>`}</span>
    ${!state.ended && html`<button onClick=${() => state.control.abort()}>${t("chat.stop")}</button>`}
    ${state.problem && html`<span class="bad">${state.problem}</span>`}
  </p>
  ${warnings.length > 0 && html`<details id="translate-warnings"><summary>${t("translate.warnings", { count: number(warnings.length) })}</summary>
    <ul>${warnings.slice(0, MAX_WARNINGS).map(({ at, message }) => html`<li><button class="plain" onClick=${() => goTo(at)}>${number(at + 1)}: ${message}</button></li>`)}</ul></details>`}`;
}

/** The segments in two columns. ↑ and ↓ choose one, Enter edits it. */
function Segments({ state, current, open, choose }) {
  const patterns = useMemo(() => patternsOf(glossary.get()), [useStore(glossary)]);
  const count = state.segments.length;
  const key = (event) => {
    if (event.target.matches("textarea, input")) return;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (step) choose(Math.min(count - 1, Math.max(0, current + step)), false);
    else if (event.key === "Enter" && current >= 0 && !event.target.matches("button")) choose(current, true);
    else return;
    event.preventDefault();
  };
  const end = (isSaved) => {
    choose(isSaved ? Math.min(count - 1, current + 1) : current, false);
    document.getElementById("segments").focus();
  };
  const row = (index) => html`<${Segment} segment=${state.segments[index]} index=${index} patterns=${patterns} options=${state.options}
    isCurrent=${index === current} isOpen=${index === current && open && state.segments[index].target !== null} choose=${choose} end=${end} />`;
  return html`<${VirtualList} id="segments" count=${count} row=${row} estimate=${ROW_PX} current=${current} label=${t("translate.segments")} onKeyDown=${key} />`;
}

function Source({ text, setText, begin, files }) {
  const input = useRef();
  const take = (given) => {
    files.add(given);
    input.current.value = "";
  };
  const key = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && text.trim() && begin();
  return html`<div>
    <textarea id="translate-source" rows="8" aria-label=${t("translate.source")} placeholder=${t("translate.placeholder", { endings: LISTED_ENDINGS })} value=${text}
      onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${key}></textarea>
    <p class="row"><button onClick=${() => input.current.click()}>${t("translate.file")}</button>
      <input ref=${input} id="translate-file" type="file" hidden multiple accept=${ACCEPTED} aria-label=${t("translate.file")} onChange=${(event) => take(event.currentTarget.files)} /></p>
  </div>`;
}

function Result({ state, edit }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(state.assemble()).then(() => setCopied(true), () => {});
  return html`<p class="row"><button id="translate-edit" onClick=${edit}>${t("translate.edit")}</button>
    <button onClick=${copy} disabled=${!state.ended}>${t(copied ? "copied" : "copy")}</button>
    <button id="translate-download" disabled=${!state.ended} onClick=${() => download(`translation.${state.options.target}.txt`, state.assemble())}>${t("translate.download")}</button>
    <small>${t("translate.keys")}</small></p>`;
}

/** State that this browser keeps over a reload. */
function useSetting(name, usual, isValid) {
  const kept = settings.get(name);
  const [value, set] = useState(kept !== null && isValid(kept) ? kept : usual);
  const change = (now) => {
    set(now);
    settings.set(name, now);
  };
  return [value, change];
}

export function Translate() {
  const language = useLanguage();
  const [source, setSource] = useSetting("source", AUTO, (code) => LANGUAGES[code]);
  const [target, setTarget] = useSetting("target", language === "zh" ? "en" : "zh-CN", (code) => LANGUAGES[code]);
  const [text, setText] = useSetting("text", "", () => true);
  const [{ current, open }, setPlace] = useState({ current: -1, open: false });
  const [state, start, close] = useTranslation();
  const files = useFiles();
  const choose = (at, isOpen) => setPlace({ current: at, open: isOpen });
  const waiting = files.all.filter((one) => one.state === "waiting").length;
  const begin = () => {
    if (waiting) files.start(source, target);
    if (!text.trim()) return;
    choose(-1, false);
    start(text, source, target);
  };
  const swap = () => {
    const from = source === AUTO ? (detected(state?.languages ?? new Map())[0] ?? (target === "en" ? "zh-CN" : "en")) : source;
    setSource(target);
    setTarget(LANGUAGES[from] ? from : from.startsWith("zh") ? "zh-CN" : "en");
    if (state?.ended) setText(state.assemble());
    close();
  };
  const reopen = (entry) => {
    setSource(entry.source);
    setTarget(entry.target);
    setText(entry.text);
    choose(-1, false);
    start(entry.text, entry.source, entry.target);
  };
  const what = waiting ? t("translate.startFiles", { count: number(waiting), language: languageName(target) }) : t("translate.start", { language: languageName(target) });
  /** A file is taken anywhere on the panel: outside of it, the browser would leave the page to show the file. */
  const dragOver = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
  const drop = (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    files.add(event.dataTransfer.files);
  };
  return html`<div class="translate" onDragOver=${dragOver} onDrop=${drop}>
    <p class="row"><${LanguageChoice} id="source-language" label=${t("translate.from")} value=${source} choose=${setSource} auto=${true} />
      <button id="swap" onClick=${swap} aria-label=${t("translate.swap")} title=${t("translate.swap")}>⇄</button>
      <${LanguageChoice} id="target-language" label=${t("translate.to")} value=${target} choose=${setTarget} />
      <button class="main" id="translate-start" disabled=${!text.trim() && !waiting} onClick=${begin}>${what}</button></p>
    ${isDemo(useStore(service)) && html`<p class="quiet">${t("welcome.demo")}</p>`}
    <div class="workbench"><div class="work">
      ${state ? html`<${Result} state=${state} edit=${close} /><${Progress} state=${state} goTo=${(at) => choose(at, false)} /><${Segments} ...${{ state, current, open, choose }} />`
        : html`<${Source} ...${{ text, setText, begin, files }} />`}
      <${Chips} files=${files} />
    </div><div class="beside">
      <${GlossaryEditor} /><${StoredGlossaries} source=${source} target=${target} /><${History} open=${reopen} changes=${state?.ended} /><${ImmersiveTranslate} />
    </div></div>
  </div>`;
}
