// Rows of values from pasted lines, CSV or JSONL, and prompts from a template. Pure functions.

/** Rows of a CSV text (RFC 4180): lists of cells. */
function csvCells(text) {
  const rows = [];
  let row = [];
  let cell = "";
  let quoted = false;
  const endCell = () => {
    row.push(cell);
    cell = "";
  };
  const endRow = () => {
    endCell();
    if (row.length > 1 || row[0] !== "") rows.push(row);
    row = [];
  };
  for (let at = 0; at < text.length; at++) {
    const letter = text[at];
    if (quoted) {
      if (letter !== '"') cell += letter;
      else if (text[at + 1] === '"') cell += text[++at];
      else quoted = false;
    } else if (letter === '"' && cell === "") quoted = true;
    else if (letter === ",") endCell();
    else if (letter === "\n") endRow();
    else if (letter !== "\r") cell += letter;
  }
  if (cell || row.length) endRow();
  return rows;
}

function fromCsv(text) {
  const [names = [], ...rows] = csvCells(text.replace(/^\ufeff/, ""));
  return rows.map((cells) => Object.fromEntries(names.map((name, at) => [name.trim(), cells[at] ?? ""])));
}

function fromJsonl(text) {
  return nonEmptyLines(text).map((line, at) => {
    let value;
    try {
      value = JSON.parse(line);
    } catch (error) {
      throw new Error(`line ${at + 1}: ${error.message}`);
    }
    if (value === null || typeof value !== "object" || Array.isArray(value)) return { line: String(value) };
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, typeof one === "string" ? one : JSON.stringify(one)]));
  });
}

const nonEmptyLines = (text) => text.split(/\r?\n/).filter((line) => line.trim());

/** Rows {column: text} of a file by its name's ending; of plain text, one row {line} a line. Throws Error. */
export function parseRows(text, name = "") {
  if (/\.csv$/i.test(name)) return fromCsv(text);
  if (/\.(jsonl|ndjson)$/i.test(name)) return fromJsonl(text);
  return nonEmptyLines(text).map((line) => ({ line }));
}

/** The template with `{column}` replaced; names that the row has not stay as they are. */
export const fillIn = (template, row) => template.replace(/\{([^{}]+)\}/g, (whole, name) => row[name.trim()] ?? whole);

const csvCell = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** Results as CSV: the row's columns, then output and finish_reason. */
export function resultsAsCsv(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.values)))];
  const lines = rows.map((row) => [...names.map((name) => row.values[name] ?? ""), row.output, row.reason ?? ""]);
  return [[...names, "output", "finish_reason"], ...lines].map((cells) => cells.map(csvCell).join(",")).join("\r\n");
}

/** Results as JSON lines. */
export const resultsAsJsonl = (rows) =>
  rows.map((row) => JSON.stringify({ index: row.index, ...row.values, output: row.output, finish_reason: row.reason, ...(row.error ? { error: row.error } : {}) })).join("\n");
