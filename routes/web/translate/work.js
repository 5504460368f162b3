// Sends files to the route of documents, and tests the route of texts.

import { post, request } from "../api.js";

const PATH = "/translate/v1/batch-translate";
const DOCUMENTS = "/translate/v1/documents";
const POLL_MS = 500;

/**
 * Translate a File. Calls `progress(document)`, and returns the document with its translation as `content`, a Blob.
 * Throws ApiError, or AbortError after `signal`, which stops the translation.
 */
export async function translateFile(file, source, target, glossaryId, signal, progress) {
  const query = new URLSearchParams({ source_lang: source, target_lang: target, memory: true, ...(glossaryId && { glossary_id: glossaryId }) });
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
