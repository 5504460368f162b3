// Sends texts to the translation route in batches, and files to the route of documents.

import { post, request, stream } from "../api.js";

const PATH = "/translate/v1/batch-translate";
const DOCUMENTS = "/translate/v1/documents";
const POLL_MS = 500;
const TEXTS_PER_REQUEST = 32;
const REQUESTS_AT_ONCE = 3;

/**
 * Translate texts and call `arrived(index, text, language)` when each is complete, and `warned(index, message)`.
 * Throws ApiError, or AbortError after `signal`.
 */
export async function translateTexts(texts, source, target, signal, arrived, warned) {
  const starts = texts.map((_, at) => at).filter((at) => at % TEXTS_PER_REQUEST === 0);
  const work = async () => {
    for (let start = starts.shift(); start !== undefined; start = starts.shift()) {
      const part = texts.slice(start, start + TEXTS_PER_REQUEST);
      const body = { source_lang: source, target_lang: target, text_list: part };
      for await (const { index, text, detected_source_lang: language, warnings = [] } of stream(PATH, body, signal)) {
        if (index !== undefined) arrived(start + index, text, language);
        for (const { field, message } of warnings) {
          const at = /\[(\d+)\]$/.exec(field)?.[1];
          warned(start + Number(at ?? 0), message.replace(/^\S+: /, ""));
        }
      }
    }
  };
  await Promise.all(Array.from({ length: REQUESTS_AT_ONCE }, work));
}

/**
 * Translate a File. Calls `progress(document)`, and returns the document with its translation as `content`, a Blob.
 * Throws ApiError, or AbortError after `signal`, which stops the translation.
 */
export async function translateFile(file, source, target, signal, progress) {
  const query = new URLSearchParams({ source_lang: source, target_lang: target });
  const upload = { method: "PUT", body: file, type: "application/octet-stream", signal };
  const json = async (path, options) => (await request(path, options)).json();
  let found = await json(`${DOCUMENTS}/${encodeURIComponent(file.name)}?${query}`, upload);
  const path = `${DOCUMENTS}/${found.id}`;
  try {
    while (found.status === "queued" || found.status === "translating") {
      progress(found);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      found = await json(path, { signal });
    }
    if (found.status === "error") throw new Error(found.error);
    progress(found);
    return { ...found, content: await (await request(`${path}/content`, { signal })).blob() };
  } finally {
    request(path, { method: "DELETE" }).catch(() => {});
  }
}

/** Test a request like immersive-translate's. Throws ApiError or Error. */
export async function checkRoute() {
  const { translations } = await post(PATH, { source_lang: "en", target_lang: "zh-CN", text_list: ["Hello"] });
  if (translations?.length !== 1 || typeof translations[0].text !== "string") throw new Error("an answer of another form");
  return translations[0].text;
}
