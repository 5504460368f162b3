// Rows from text lines, CSV or JSONL, and prompts from a template. Pure functions.

/** Parse a CSV text (RFC 4180) into lists of cells. */
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

/**
 * Parse a file by its name's ending into rows {column: text}. Plain text: one row {line} per line, or per block between
 * blank lines. Throws Error.
 */
export function parseRows(text, name = "", isBlocks = false) {
  if (/\.csv$/i.test(name)) return fromCsv(text);
  if (/\.(jsonl|ndjson)$/i.test(name)) return fromJsonl(text);
  const rows = isBlocks ? text.split(/\r?\n(?:[ \t]*\r?\n)+/).map((block) => block.trim()).filter(Boolean) : nonEmptyLines(text);
  return rows.map((line) => ({ line }));
}

/** Replace `{column}` in the template. Unknown columns stay unchanged. */
export const fillIn = (template, row) => template.replace(/\{([^{}]+)\}/g, (whole, name) => row[name.trim()] ?? whole);

const csvCell = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** Results as CSV: the row's columns, output and finish_reason. */
export function resultsAsCsv(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.values)))];
  const lines = rows.map((row) => [...names.map((name) => row.values[name] ?? ""), row.output, row.reason ?? ""]);
  return [[...names, "output", "finish_reason"], ...lines].map((cells) => cells.map(csvCell).join(",")).join("\r\n");
}

/** Results as JSON lines. */
export const resultsAsJsonl = (rows) =>
  rows.map((row) => JSON.stringify({ index: row.index, ...row.values, output: row.output, finish_reason: row.reason, ...(row.error ? { error: row.error } : {}) })).join("\n");
