// Runs many prompts in requests of many rows each, as streams.

import { post, stream } from "../api.js";
import { fillIn } from "./table.js";

const ROWS_PER_REQUEST = 1000;
const REQUESTS_AT_ONCE = 2;

/** Rows of a run: {index, values, prompt, output, reason, error}. */
export const rowsOf = (values, template) =>
  values.map((one, index) => ({ index, values: one, prompt: fillIn(template, one), output: "", reason: null, error: null }));

/** The start of an answer. After a closed thought, it is without the line break that ends that line of the prompt. */
export const startOf = (prompt, text) => (prompt.endsWith("</think>") ? text.trimStart() : text);

async function runPart(path, fields, rows, signal, changed) {
  for await (const event of stream(path, { ...fields, contents: rows.map((row) => row.prompt) }, signal)) {
    if (event.error) {
      Object.assign(rows[event.index], { error: event.error, reason: "error" });
      changed(rows[event.index]);
    }
    for (const choice of event.choices ?? []) {
      const row = rows[choice.index];
      const text = choice.delta.content ?? "";
      row.output += row.output ? text : startOf(row.prompt, text);
      row.reason ??= choice.finish_reason ?? null;
      changed(row);
    }
  }
}

function fail(rows, error, changed) {
  for (const row of rows) {
    if (row.reason) continue;
    row.reason = error.name === "AbortError" ? "stopped" : "error";
    if (row.reason === "error") row.error = error.message || "offline";
    changed(row);
  }
}

/** Generate every row and call `changed(row)` for each update. Errors are stored in their rows. */
export async function runRows(path, fields, rows, signal, changed) {
  const parts = [];
  for (let at = 0; at < rows.length; at += ROWS_PER_REQUEST) parts.push(rows.slice(at, at + ROWS_PER_REQUEST));
  const work = async () => {
    for (let part = parts.shift(); part; part = parts.shift()) {
      await runPart(path, fields, part, signal, changed).catch((error) => fail(part, error, changed));
    }
  };
  await Promise.all(Array.from({ length: REQUESTS_AT_ONCE }, work));
}

/** Return the number of tokens of all outputs, from the service. Throws ApiError. */
export async function countTokens(rows) {
  const texts = rows.map((row) => row.output).filter(Boolean);
  let tokens = 0;
  for (let at = 0; at < texts.length; at += ROWS_PER_REQUEST) {
    tokens += (await post("/v1/tokens/count", { contents: texts.slice(at, at + ROWS_PER_REQUEST) })).tokens;
  }
  return tokens;
}
