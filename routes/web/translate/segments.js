// Segments of a text, their translations, and the memory of approved ones. Without the page.

import { post, stream } from "../api.js";

const PATH = "/translate/v1/batch-translate";
const MEMORY = "/translate/v1/memory";
const TEXTS_PER_REQUEST = 32;
const REQUESTS_AT_ONCE = 3;
const ALTERNATIVES = 3;
/** Longer lines are split into sentences. */
const LONG_LINE = 300;

const sentences = new Intl.Segmenter(undefined, { granularity: "sentence" });

/** Texts and the white space between them, alternating: segments are at even places, unless they are blank. */
function piecesOf(text) {
  const pieces = [];
  for (const [at, part] of text.split(/(\r?\n)/).entries()) {
    if (at % 2 || part.length <= LONG_LINE) pieces.push(part);
    else {
      const parts = [...sentences.segment(part)].map((one) => one.segment);
      for (const [number, one] of parts.entries()) {
        const end = one.length - one.trimEnd().length;
        pieces.push(end ? one.slice(0, -end) : one);
        if (number < parts.length - 1) pieces.push(end ? one.slice(-end) : "");
        else if (end) pieces[pieces.length - 1] = one;
      }
    }
  }
  return pieces;
}

/**
 * A text as segments {source, target, language, origin, warnings, isEdited}, target null before it is there, and
 * `assemble()` -> the translated text, in which the white space between segments is kept.
 */
export function segmented(text) {
  const pieces = piecesOf(text);
  const places = pieces.map((_, at) => at).filter((at) => at % 2 === 0 && pieces[at].trim() !== "");
  const segments = places.map((at) => ({ source: pieces[at], target: null, language: "", origin: "", warnings: [], isEdited: false }));
  const assemble = () => {
    const all = [...pieces];
    for (const [index, at] of places.entries()) all[at] = segments[index].target ?? "";
    return all.join("");
  };
  return { segments, assemble };
}

/**
 * Translate segments and call `arrived(segment)` for each. `options`: source, target, signal, glossaryFields().
 * Throws ApiError, or AbortError after `options.signal`.
 */
export async function translateSegments(segments, options, arrived) {
  const starts = segments.map((_, at) => at).filter((at) => at % TEXTS_PER_REQUEST === 0);
  const work = async () => {
    for (let start = starts.shift(); start !== undefined; start = starts.shift()) {
      const part = segments.slice(start, start + TEXTS_PER_REQUEST);
      for await (const event of stream(PATH, bodyOf(part, options), options.signal)) {
        const { index, text, detected_source_lang: language, source: origin = "", warnings = [] } = event;
        for (const { field, message } of warnings) {
          const at = /\[(\d+)\]$/.exec(field)?.[1];
          part[Number(at ?? 0)].warnings.push(message.replace(/^\S+: /, ""));
        }
        if (index === undefined) continue;
        Object.assign(part[index], { target: text, language, origin });
        arrived(part[index]);
      }
    }
  };
  await Promise.all(Array.from({ length: REQUESTS_AT_ONCE }, work));
}

const bodyOf = (segments, { source, target, glossary, glossaryMode, glossaryId }) => ({
  source_lang: source,
  target_lang: target,
  text_list: segments.map((one) => one.source),
  memory: true,
  ...(Object.keys(glossary).length ? { glossary } : {}),
  ...(glossaryId ? { glossary_id: glossaryId } : {}),
  ...(Object.keys(glossary).length || glossaryId ? { glossary_mode: glossaryMode } : {}),
});

/** Other translations of a segment, most likely first. Throws ApiError. */
export async function alternativesOf(segment, options) {
  const { translations } = await post(PATH, { ...bodyOf([segment], options), memory: false, alternatives: ALTERNATIVES });
  const [{ text, alternatives }] = translations;
  return [...new Set([text, ...alternatives.map((one) => one.text)])].filter((one) => one !== segment.target);
}

/** Keep a segment's translation in the memory. Throws ApiError. */
export const remember = (segment, source, target) =>
  post(MEMORY, { source_lang: source, target_lang: target, pairs: [{ source: segment.source.trim(), target: segment.target.trim() }] });
