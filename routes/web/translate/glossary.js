// The glossary of this browser: its editor, and terms underlined in texts.

import { t } from "../i18n.js";
import { choice, createStore, html, settings, useState, useStore } from "../ui.js";

const MAX_TERMS = 200;
const MODES = ["check", "enforce", "hint"];

function kept() {
  try {
    const { terms, mode, stored = "" } = JSON.parse(settings.get("glossary"));
    return { terms: terms.map(([term, translation]) => [String(term), String(translation)]), mode: MODES.includes(mode) ? mode : MODES[0], stored };
  } catch {
    return { terms: [], mode: MODES[0], stored: "" };
  }
}

/** {terms: [[term, translation with forms separated by "|"]], mode, stored: id of a glossary of the service}. */
export const glossary = createStore(kept());
glossary.subscribe((now) => settings.set("glossary", JSON.stringify(now)));

/** The glossary's fields of a translation request. */
export const glossaryFields = () => ({
  glossary: Object.fromEntries(glossary.get().terms.filter(([term, translation]) => term.trim() && translation.trim())),
  glossaryMode: glossary.get().mode,
  glossaryId: glossary.get().stored,
});

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const LETTER = /[\p{L}\p{N}]/u;
const CJK = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}\p{Script=Thai}]/u;
const isWord = (letter) => LETTER.test(letter) && !CJK.test(letter);

/** A pattern for whole words, longest first. null without words. */
function patternOf(words) {
  const known = [...new Set(words.map((word) => word.trim()).filter(Boolean))].sort((one, other) => other.length - one.length);
  if (!known.length) return null;
  const whole = known.map((word) => `${isWord(word[0]) ? "(?<![\\p{L}\\p{N}])" : ""}${escaped(word)}${isWord(word.at(-1)) ? "(?![\\p{L}\\p{N}])" : ""}`);
  return new RegExp(`(${whole.join("|")})`, "giu");
}

/** Patterns of the terms and of their translations. */
export const patternsOf = ({ terms }) => ({
  source: patternOf(terms.map(([term]) => term)),
  target: patternOf(terms.flatMap(([, translation]) => translation.split("|"))),
});

/** A text with its terms underlined. */
export const underlined = (text, pattern) =>
  pattern ? text.split(pattern).map((part, at) => (at % 2 ? html`<u class="term">${part}</u>` : part)) : text;

function Term({ at, term, translation }) {
  const change = (place, text) => glossary.set(({ terms, ...others }) => ({
    ...others,
    terms: terms.map((one, index) => (index === at ? (place ? [one[0], text] : [text, one[1]]) : one)),
  }));
  const remove = () => glossary.set(({ terms, ...others }) => ({ ...others, terms: terms.filter((_, index) => index !== at) }));
  return html`<li class="row term-row">
    <input aria-label=${t("glossary.term")} maxlength="100" value=${term} onChange=${(event) => change(0, event.currentTarget.value)} />
    <input aria-label=${t("glossary.translation")} maxlength="1000" value=${translation} onChange=${(event) => change(1, event.currentTarget.value)} />
    <button class="plain" onClick=${remove} aria-label=${`${t("glossary.remove")} ${term}`}>✕</button></li>`;
}

/** The editor. The next translation uses the terms. */
export function GlossaryEditor() {
  const { terms, mode } = useStore(glossary);
  const [term, setTerm] = useState("");
  const [translation, setTranslation] = useState("");
  const setMode = (chosen) => glossary.set((now) => ({ ...now, mode: chosen }));
  const add = (event) => {
    event.preventDefault();
    glossary.set((now) => ({ ...now, terms: [...now.terms, [term.trim(), translation.trim()]] }));
    setTerm("");
    setTranslation("");
  };
  return html`<details id="glossary"><summary>${t("glossary.title", { count: terms.length })}</summary>
    <p><small>${t("glossary.about")}</small></p>
    ${choice("glossary-mode", t("glossary.mode"), mode, setMode, MODES, (one) => t(`glossary.${one}`))}
    <ul class="plainlist">${terms.map(([one, other], at) => html`<${Term} key=${`${at} ${one}`} at=${at} term=${one} translation=${other} />`)}</ul>
    <form class="row term-row" onSubmit=${add}>
      <input id="glossary-term" required maxlength="100" aria-label=${t("glossary.term")} placeholder=${t("glossary.term")} value=${term} onInput=${(event) => setTerm(event.currentTarget.value)} />
      <input id="glossary-translation" required maxlength="1000" aria-label=${t("glossary.translation")} placeholder=${t("glossary.translation")} value=${translation} onInput=${(event) => setTranslation(event.currentTarget.value)} />
      <button disabled=${terms.length >= MAX_TERMS}>${t("admin.add")}</button>
    </form></details>`;
}
