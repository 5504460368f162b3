// Sends files to the route of documents, and tests the route of texts.

import { json, post, postForm, request } from "../api.js";

const PATH = "/translate/v1/batch-translate";
const DOCUMENTS = "/translate/v1/documents";
const POLL_MS = 500;

/** Send a File with the glossary's fields. Returns its document. Throws ApiError. */
export function sendFile(file, source, target, { glossary, glossaryMode, glossaryId }, signal) {
  const fields = { source_lang: source, target_lang: target, glossary: JSON.stringify(glossary), glossary_mode: glossaryMode, memory: "true" };
  return postForm(DOCUMENTS, { ...fields, ...(glossaryId && { glossary_id: glossaryId }), file }, signal);
}

/** Call `progress(document)` until a document is translated; return it. Throws ApiError, or AbortError after `signal`. */
export async function followDocument(id, signal, progress) {
  for (;;) {
    const found = await json(`${DOCUMENTS}/${id}`, { signal });
    progress(found);
    if (found.status === "done" || found.status === "error") return found;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/** The translated file, a Blob. Throws ApiError. */
export const contentOf = async (id) => (await request(`${DOCUMENTS}/${id}/content`)).blob();

/** Stop a translation, and delete its files. */
export const deleteDocument = (id) => request(`${DOCUMENTS}/${id}`, { method: "DELETE" }).catch(() => {});

/** Test a request like immersive-translate's. Throws ApiError or Error. */
export async function checkRoute() {
  const { translations } = await post(PATH, { source_lang: "en", target_lang: "zh-CN", text_list: ["Hello"] });
  if (translations?.length !== 1 || typeof translations[0].text !== "string") throw new Error("an answer of another form");
  return translations[0].text;
}
