// Splits files into texts to translate: {texts, assemble(translations) -> string or Blob}, and
// `preview(translations)` for binary formats. Time codes, keys, code blocks and tags are kept.

import { epub } from "./epub.js";
import { parseXml } from "./xml.js";

/** Lines. White space between them is kept. */
export function plain(text) {
  return pieces(text.split(/(\r?\n)/), (piece, at) => at % 2 === 0 && piece.trim() !== "");
}

/** Translates the pieces that `wanted` selects. */
function pieces(list, wanted) {
  const places = list.map((_, at) => at).filter((at) => wanted(list[at], at));
  return {
    texts: places.map((at) => list[at]),
    assemble(translations) {
      const all = [...list];
      for (const [index, at] of places.entries()) all[at] = translations[index];
      return all.join("");
    },
  };
}

/** Markdown: blocks except code. Markup at the beginning of lines is kept. */
function markdownText(text) {
  const parts = [];
  const translated = new Set();
  let fenced = false;
  for (const line of text.split(/(?<=\n)/)) {
    if (/^\s*(```|~~~)/.test(line)) fenced = !fenced;
    const [, mark, words, end] = /^(\s*(?:#{1,6}\s+|[-*+]\s+|\d+[.)]\s+|>\s?)*)([^\r\n]*)(\r?\n?)$/.exec(line);
    parts.push(mark);
    if (!fenced && !/^\s*(```|~~~)/.test(line) && !/^( {4}|\t)/.test(line) && /\p{L}/u.test(words)) translated.add(parts.length);
    parts.push(words, end);
  }
  return pieces(parts, (_, at) => translated.has(at));
}

/** Subtitles (SRT and WebVTT): the lines below each time code. */
function subtitles(text) {
  const blocks = text.split(/(\r?\n(?:[^\S\r\n]*\r?\n)+)/);
  const parts = [];
  const translated = new Set();
  for (const [at, block] of blocks.entries()) {
    const cue = at % 2 === 0 && /^((?:.*\r?\n)?[^\n]*-->[^\n]*\r?\n)([\s\S]*)$/.exec(block);
    if (!cue || !cue[2].trim()) {
      parts.push(block);
      continue;
    }
    const [, words, end] = /^([\s\S]*?)(\s*)$/.exec(cue[2]);
    parts.push(cue[1]);
    translated.add(parts.length);
    parts.push(words, end);
  }
  return pieces(parts, (_, at) => translated.has(at));
}

/** JSON: every string value at any depth. Keys are kept. */
function json(text) {
  const data = JSON.parse(text);
  const places = [];
  const look = (holder, key) => {
    const value = holder[key];
    if (typeof value === "string") {
      if (value.trim()) places.push([holder, key]);
    } else if (value && typeof value === "object") for (const inner of Object.keys(value)) look(value, inner);
  };
  const root = { data };
  look(root, "data");
  return {
    texts: places.map(([holder, key]) => holder[key]),
    assemble(translations) {
      for (const [at, [holder, key]] of places.entries()) holder[key] = translations[at];
      return `${JSON.stringify(root.data, null, 2)}\n`;
    },
  };
}

/** XLIFF 1.2 and 2: writes each source's translation into its target. */
function xliff(text, targetLanguage) {
  const page = parseXml(text);
  const sources = [...page.getElementsByTagName("source")].filter((one) => one.textContent.trim());
  return {
    texts: sources.map((one) => one.textContent),
    assemble(translations) {
      for (const [at, source] of sources.entries()) {
        let target = [...source.parentNode.children].find((one) => one.tagName === "target");
        if (!target) {
          target = page.createElementNS(source.namespaceURI, "target");
          source.after("\n", target);
        }
        target.textContent = translations[at];
      }
      const root = page.documentElement;
      if (root.hasAttribute("version") && root.getAttribute("version").startsWith("2")) root.setAttribute("trgLang", targetLanguage);
      else for (const file of page.getElementsByTagName("file")) file.setAttribute("target-language", targetLanguage);
      const head = /^\s*<\?xml[^>]*\?>\s*/.exec(text)?.[0] ?? "";
      return head + new XMLSerializer().serializeToString(root) + "\n";
    },
  };
}

const FORMATS = { txt: plain, md: markdownText, markdown: markdownText, srt: subtitles, vtt: subtitles, json, xliff, xlf: xliff };
export const ENDINGS = [...Object.keys(FORMATS), "epub"];

const endingOf = (name) => name.slice(name.lastIndexOf(".") + 1).toLowerCase();

/** Split a File by its name's ending. `source`: its text, for text formats. Throws Error. */
export async function takeApart(file, targetLanguage) {
  const ending = endingOf(file.name);
  if (ending === "epub") {
    const made = await epub(new Uint8Array(await file.arrayBuffer()));
    return { ...made, source: made.texts.join("\n\n") };
  }
  if (!FORMATS[ending]) throw new Error(`only ${ENDINGS.join(", ")}`);
  const text = await file.text();
  return { ...FORMATS[ending](text, targetLanguage), source: text };
}

/** "page.en.md" in zh-CN -> "page.en.zh-CN.md". */
export const nameOfTranslation = (name, language) => name.replace(/(\.[^.]*)?$/, (ending) => `.${language}${ending}`);
