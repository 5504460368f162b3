// The translation panel: two text boxes, files, and settings for immersive-translate.

import { address, password } from "../api.js";
import { number, t, useLanguage } from "../i18n.js";
import { download, html, oncePerFrame, settings, useRef, useState } from "../ui.js";
import { checkRoute, translateFile, translateTexts } from "./work.js";

const LANGUAGES = {
  "zh-CN": "简体中文", "zh-TW": "繁體中文", en: "English", ja: "日本語", ko: "한국어", fr: "Français", de: "Deutsch",
  es: "Español", it: "Italiano", pt: "Português", ru: "Русский", ar: "العربية", hi: "हिन्दी", vi: "Tiếng Việt",
  th: "ไทย", id: "Bahasa Indonesia", tr: "Türkçe", pl: "Polski", nl: "Nederlands", uk: "Українська",
};
const AUTO = "auto";
const BINARY = ["docx", "pptx", "xlsx", "odt", "epub"];
const ENDINGS = [
  ...BINARY, "txt", "md", "html", "srt", "vtt", "ass", "po", "pot", "xlf", "xliff", "tmx", "json", "arb", "yaml", "yml",
  "xml", "xcstrings", "properties", "strings", "csv", "tsv",
];
const isBinary = (file) => BINARY.includes(file.name.slice(file.name.lastIndexOf(".") + 1).toLowerCase());
const MAX_WARNINGS = 200;

function LanguageChoice({ id, label, value, choose, auto }) {
  return html`<label for=${id}>${label} <select id=${id} value=${value} onChange=${(event) => choose(event.currentTarget.value)}>
    ${auto && html`<option value=${AUTO} selected=${value === AUTO}>${t("translate.auto")}</option>`}
    ${Object.entries(LANGUAGES).map(([code, name]) => html`<option value=${code} selected=${value === code} lang=${code}>${name}</option>`)}
  </select></label>`;
}

/** Lines of a text. White space between them is kept. */
function linesOf(text) {
  const pieces = text.split(/(\r?\n)/);
  const places = pieces.map((_, at) => at).filter((at) => at % 2 === 0 && pieces[at].trim() !== "");
  const assemble = (translations) => {
    const all = [...pieces];
    for (const [index, at] of places.entries()) all[at] = translations[index];
    return all.join("");
  };
  return { texts: places.map((at) => pieces[at]), assemble };
}

/** A running translation of a text or a file, with its progress. */
function useTranslation() {
  const [state, setState] = useState(null);
  const run = async (name, target, count, work) => {
    const control = new AbortController();
    const now = { name, target, done: 0, count, text: "", languages: new Map(), warnings: [], ended: false, problem: "", control };
    const show = oncePerFrame(() => setState({ ...now }));
    show();
    try {
      await work(now, show);
    } catch (error) {
      now.problem = error.name === "AbortError" ? t("translate.stopped") : error.message || t("notice.offline");
    }
    now.ended = true;
    show();
    return now;
  };
  const startText = (text, source, target) => {
    const { texts, assemble } = linesOf(text);
    const translations = texts.map(() => "");
    return run("", target, texts.length, async (now, show) => {
      now.text = assemble(translations);
      await translateTexts(texts, source, target, now.control.signal, (at, translation, language) => {
        translations[at] = translation;
        now.text = assemble(translations);
        now.done += 1;
        now.languages.set(language, (now.languages.get(language) ?? 0) + 1);
        show();
      }, (at, message) => now.warnings.push({ at, message }));
    });
  };
  const startFile = (file, source, target) => run(file.name, target, 0, async (now, show) => {
    const { content, filename, failed } = await translateFile(file, source, target, now.control.signal, (found) => {
      Object.assign(now, { done: found.translated + found.failed, count: found.texts });
      show();
    });
    if (failed) now.problem = t("translate.failed", { count: number(failed) });
    Object.assign(now, { name: filename, content, text: isBinary(file) ? filename : await content.text() });
  });
  return [state, startText, startFile];
}

/** The detected languages, most frequent first. */
function Detected({ languages }) {
  const names = [...languages].sort((one, other) => other[1] - one[1]).map(([code]) => LANGUAGES[code] ?? code);
  return names.length ? html` · ${t("translate.detected")} <b id="detected">${names.join(", ")}</b>` : null;
}

function Progress({ state }) {
  if (!state) return null;
  return html`<p class="row" id="translate-progress" data-ended=${state.ended} role="status">
    <progress max=${state.count || 1} value=${state.count ? state.done : 1} aria-label=${t("translate.progress")}></progress>
    <span>${t("translate.paragraphs", { done: number(state.done), count: number(state.count) })}<${Detected} languages=${state.languages} /></span>
    ${!state.ended && html`<button onClick=${() => state.control.abort()}>${t("chat.stop")}</button>`}
    ${state.problem && html`<span class="bad">${state.problem}</span>`}
  </p>
  ${state.warnings.length > 0 && html`<details id="translate-warnings"><summary>${t("translate.warnings", { count: number(state.warnings.length) })}</summary>
    <ul>${state.warnings.slice(0, MAX_WARNINGS).map(({ at, message }) => html`<li>${number(at + 1)}: ${message}</li>`)}</ul></details>`}`;
}

function Panes({ text, setText, state, begin, take }) {
  const [copied, setCopied] = useState(false);
  const input = useRef();
  const drop = (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  };
  const copy = () => navigator.clipboard.writeText(state.text).then(() => setCopied(true), () => {});
  return html`<div class="panes">
    <div class="pane" onDragOver=${(event) => event.preventDefault()} onDrop=${drop}>
      <textarea id="translate-source" aria-label=${t("translate.source")} placeholder=${t("translate.placeholder", { endings: ENDINGS.join(", ") })} value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea>
      <p class="row"><button class="main" id="translate-start" disabled=${!text.trim()} onClick=${begin}>${t("translate.start")}</button>
        <button onClick=${() => input.current.click()}>${t("translate.file")}</button>
        <input ref=${input} id="translate-file" type="file" hidden accept=${ENDINGS.map((ending) => `.${ending}`).join(",")} aria-label=${t("translate.file")} onChange=${(event) => event.currentTarget.files[0] && take(event.currentTarget.files[0])} /></p>
    </div>
    <div class="pane">
      <textarea id="translate-target" aria-label=${t("translate.target")} readonly value=${state?.text ?? ""} lang=${state?.target}></textarea>
      <p class="row"><button onClick=${copy} disabled=${!state?.ended}>${t(copied ? "copied" : "copy")}</button>
        <button id="translate-download" disabled=${!state?.ended || (state.name && !state.content)} onClick=${() => download(state.name || `translation.${state.target}.txt`, state.content ?? state.text)}>${t("translate.download")}</button></p>
    </div>
  </div>`;
}

function CopyField({ id, label, value, secret }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(value).then(() => setCopied(true), () => {});
  return html`<div class="copyfield"><label for=${id}>${label}</label>
    <input id=${id} type=${secret ? "password" : "text"} readonly value=${value} autocomplete="off" />
    <button onClick=${copy} aria-label=${`${t("copy")}: ${label}`}>${t(copied ? "copied" : "copy")}</button></div>`;
}

/** Settings for the browser plugin, with a test. */
function ImmersiveTranslate() {
  const [result, setResult] = useState(null);
  const check = async () => {
    setResult({ text: t("plugin.checking") });
    try {
      setResult({ good: true, text: t("plugin.works", { text: await checkRoute() }) });
    } catch (error) {
      setResult({ good: false, text: error.message || t("notice.offline") });
    }
  };
  const secret = password.get();
  return html`<details class="plugin"><summary>${t("plugin.title")}</summary>
    <p>${t("plugin.about")}</p>
    <${CopyField} id="plugin-url" label=${t("plugin.url")} value=${address("/translate/v1/batch-translate").href} />
    ${secret && html`<${CopyField} id="plugin-password" label=${t("plugin.password")} value=${secret} secret=${true} />`}
    <p class="row"><button id="plugin-check" onClick=${check}>${t("plugin.check")}</button>
      <span id="plugin-result" role="status" class=${result?.good ? "good" : result?.good === false ? "bad" : ""}>${result?.text ?? ""}</span></p>
  </details>`;
}

export function Translate() {
  const language = useLanguage();
  const [source, setSource] = useState(AUTO);
  const [target, setTarget] = useState(LANGUAGES[settings.get("target")] ? settings.get("target") : language === "zh" ? "en" : "zh-CN");
  const [text, setText] = useState("");
  const [problem, setProblem] = useState("");
  const [state, startText, startFile] = useTranslation();
  const choose = (code) => {
    setTarget(code);
    settings.set("target", code);
  };
  const take = async (file) => {
    setProblem("");
    setText(isBinary(file) ? "" : await file.text());
    const { content, problem: reason } = await startFile(file, source, target);
    if (!content) setProblem(`${file.name}: ${reason}`);
  };
  return html`<div class="translate">
    <p class="row"><${LanguageChoice} id="source-language" label=${t("translate.from")} value=${source} choose=${setSource} auto=${true} />
      <${LanguageChoice} id="target-language" label=${t("translate.to")} value=${target} choose=${choose} /></p>
    <${Panes} ...${{ text, setText, state, take }} begin=${() => startText(text, source, target)} />
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    <${Progress} state=${state} />
    <${ImmersiveTranslate} />
  </div>`;
}
