// Languages of the translation panel, and their selects.

import { t } from "../i18n.js";
import { html } from "../ui.js";

export const LANGUAGES = {
  "zh-CN": "简体中文", "zh-TW": "繁體中文", en: "English", ja: "日本語", ko: "한국어", fr: "Français", de: "Deutsch",
  es: "Español", it: "Italiano", pt: "Português", ru: "Русский", ar: "العربية", hi: "हिन्दी", vi: "Tiếng Việt",
  th: "ไทย", id: "Bahasa Indonesia", tr: "Türkçe", pl: "Polski", nl: "Nederlands", uk: "Українська",
};
export const AUTO = "auto";

export const languageName = (code) => LANGUAGES[code] ?? code;

/** A select with all languages. */
export function LanguageChoice({ id, label, value, choose, auto }) {
  return html`<label for=${id}>${label} <select id=${id} value=${value} onChange=${(event) => choose(event.currentTarget.value)}>
    ${auto && html`<option value=${AUTO} selected=${value === AUTO}>${t("translate.auto")}</option>`}
    ${Object.entries(LANGUAGES).map(([code, name]) => html`<option value=${code} selected=${value === code} lang=${code}>${name}</option>`)}
  </select></label>`;
}
