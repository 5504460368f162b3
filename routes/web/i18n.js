// Texts of the page. The default is the browser's language. Another language is a file in text/ and a name in TEXTS.

import en from "./text/en.js";
import zh from "./text/zh.js";
import { createStore, settings, useStore } from "./ui.js";

const TEXTS = { en, zh };

const preferred = () => (navigator.languages || []).map((name) => name.slice(0, 2)).find((name) => name in TEXTS);
export const language = createStore(TEXTS[settings.get("language")] ? settings.get("language") : preferred() || "en");

/** Tag of the language for the browser, like "zh-CN". */
export const locale = () => TEXTS[language.get()]["language.tag"];

document.documentElement.lang = locale();
language.subscribe((name) => {
  settings.set("language", name);
  document.documentElement.lang = locale();
});

/** The language that the switch offers: {name, title, tag}. */
export function nextLanguage() {
  const names = Object.keys(TEXTS);
  const name = names[(names.indexOf(language.get()) + 1) % names.length];
  return { name, title: TEXTS[name]["language.title"], tag: TEXTS[name]["language.tag"] };
}

/** The text of `key`. `{name}` is replaced by `values.name`, and `{name|row|rows}` by the word for that number. */
export function t(key, values = {}) {
  const text = TEXTS[language.get()][key] ?? en[key] ?? key;
  return text.replace(/\{(\w+)(?:\|([^|}]+)\|([^}]+))?\}/g, (whole, name, one, many) => {
    if (!(name in values)) return whole;
    return one ? (String(values[name]) === "1" ? one : many) : String(values[name]);
  });
}

/** Render a component again when the language changes. */
export const useLanguage = () => useStore(language);

/** A time of `seconds` in its largest unit, like "3 min". */
export function duration(seconds) {
  const [unit, size] = [["hour", 3600], ["minute", 60]].find(([, size]) => seconds >= 1.5 * size) ?? ["second", 1];
  const value = Math.max(1, Math.round(seconds / size));
  return value.toLocaleString(locale(), { style: "unit", unit, unitDisplay: "short" });
}

/** Format a number for the language. */
export const number = (value, digits = 0) =>
  Number.isFinite(value)
    ? value.toLocaleString(locale(), {
        minimumFractionDigits: digits,
        maximumFractionDigits: digits,
      })
    : "–";
