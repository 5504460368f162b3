// Texts in English and Chinese. The default is the browser's language.

import en from "./text/en.js";
import zh from "./text/zh.js";
import { createStore, settings, useStore } from "./ui.js";

const TEXTS = { en, zh };

const preferred = () => (navigator.languages || []).map((name) => name.slice(0, 2)).find((name) => name in TEXTS);
export const language = createStore(TEXTS[settings.get("language")] ? settings.get("language") : preferred() || "en");

document.documentElement.lang = language.get() === "zh" ? "zh-CN" : "en";
language.subscribe((name) => {
  settings.set("language", name);
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
});

/** The text of `key`, with `{name}` replaced by `values.name`. */
export function t(key, values = {}) {
  const text = TEXTS[language.get()][key] ?? en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** Render a component again when the language changes. */
export const useLanguage = () => useStore(language);

/** Format a number for the language. */
export const number = (value, digits = 0) =>
  Number.isFinite(value)
    ? value.toLocaleString(language.get() === "zh" ? "zh-CN" : "en-US", {
        minimumFractionDigits: digits,
        maximumFractionDigits: digits,
      })
    : "–";
