// Runs in the background by OpenAI's batches. The service keeps their rows, so a reloaded page finds them again.

import { json, post, postForm, request } from "../api.js";
import { startOf } from "./run.js";

const FILES = "/openai/v1/files";
const BATCHES = "/openai/v1/batches";
const OURS = { page: "rwkv-batch" };
const LISTED = 100;

const linesOf = async (id) => (id ? (await (await request(`${FILES}/${id}/content`)).text()).split("\n").filter(Boolean).map((line) => JSON.parse(line)) : []);

export const isEnded = (batch) => ["completed", "failed", "expired", "cancelled"].includes(batch.status);

/** Upload the rows and start a batch. Returns it. Throws ApiError. */
export async function startBatch(path, fields, rows) {
  const lines = rows.map((row) => JSON.stringify({ custom_id: String(row.index), method: "POST", url: path, values: row.values, body: { ...fields, contents: [row.prompt], stream: false } }));
  const file = new File([lines.join("\n")], "page.jsonl", { type: "application/jsonl" });
  const { id } = await postForm(FILES, { purpose: "batch", file });
  return post(BATCHES, { input_file_id: id, endpoint: path, metadata: { ...OURS, rows: String(rows.length) } });
}

/** The batches of pages, newest first. */
export async function listBatches() {
  const { data } = await json(`${BATCHES}?limit=${LISTED}`);
  return data.filter((batch) => batch.metadata?.page === OURS.page);
}

export const getBatch = (id) => json(`${BATCHES}/${id}`);
export const cancelBatch = (id) => post(`${BATCHES}/${id}/cancel`, {});

/** The rows of a batch, without answers. */
export async function inputRows(batch) {
  return (await linesOf(batch.input_file_id)).map((line, index) => ({
    index, values: line.values ?? {}, prompt: line.body.contents[0], output: "", reason: null, error: null,
  }));
}

/** Fill in the answers of an ended batch. Returns the number of their tokens. */
export async function fillRows(batch, rows) {
  let tokens = 0;
  for (const { custom_id: at, response } of await linesOf(batch.output_file_id)) {
    const [choice] = response.body.choices;
    Object.assign(rows[at], { output: startOf(rows[at].prompt, choice.message?.content ?? choice.text ?? ""), reason: choice.finish_reason });
    tokens += response.body.usage?.completion_tokens ?? 0;
  }
  for (const { custom_id: at, response, error } of await linesOf(batch.error_file_id)) {
    const given = response?.body.error;
    Object.assign(rows[at], { error: error?.message ?? given?.message ?? given ?? "error", reason: "error" });
  }
  for (const row of rows) row.reason ??= "stopped";
  return tokens;
}
