// The batch panel: one template, many rows, all answers as streams.

import { DecodeParameters, chosenModel, decodeFields } from "../decode.js";
import { total } from "../dashboard/prometheus.js";
import { number, t, useLanguage } from "../i18n.js";
import { service } from "../monitor.js";
import { download, html, useEffect, useRef, useState, useStore } from "../ui.js";
import { createGrid } from "./grid.js";
import { countTokens, rowsOf, runRows } from "./run.js";
import { parseRows, resultsAsCsv, resultsAsJsonl } from "./table.js";

const TEMPLATES = {
  chat: "User: {line}\n\nAssistant: <think>\n</think>",
  translate: "English: {line}\n\nChinese:",
  raw: "{line}",
};
const ROUTES = ["/v1/chat/completions", "/v2/chat/completions", "/big_batch/completions"];
const COUNT_MS = 200;
/** States of rows that the wall can show alone. */
const FILTERS = ["all", "running", "stop", "length", "stopped", "error"];
const CHUNK_TOKENS = 2;

/** Input of the rows: text or a file. */
function useSource() {
  const [lines, setLines] = useState("");
  const [file, setFile] = useState(null);
  const [problem, setProblem] = useState("");
  const take = async (one) => {
    try {
      setFile({ name: one.name, rows: parseRows(await one.text(), one.name) });
      setProblem("");
    } catch (error) {
      setProblem(`${one.name}: ${error.message}`);
    }
  };
  return { lines, setLines, file, forget: () => setFile(null), take, problem, rows: file ? file.rows : parseRows(lines) };
}

function Source({ source }) {
  const input = useRef();
  const drop = (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) source.take(event.dataTransfer.files[0]);
  };
  return html`<div class="field" onDragOver=${(event) => event.preventDefault()} onDrop=${drop}>
    <label for="batch-lines">${t("batch.lines")}</label>
    ${source.file
      ? html`<p class="row"><b>${source.file.name}</b> ${t("batch.columns", { names: Object.keys(source.file.rows[0] ?? {}).map((name) => `{${name}}`).join(" ") })}
          <button onClick=${source.forget}>${t("batch.forget")}</button></p>`
      : html`<textarea id="batch-lines" rows="5" value=${source.lines} placeholder=${t("batch.placeholder")} onInput=${(event) => source.setLines(event.currentTarget.value)}></textarea>`}
    <p class="row"><button onClick=${() => input.current.click()}>${t("batch.file")}</button>
      <input ref=${input} id="batch-file" type="file" hidden accept=".txt,.csv,.jsonl,.ndjson" aria-label=${t("batch.file")} onChange=${(event) => source.take(event.currentTarget.files[0])} />
      <span class="quiet">${t("batch.rows", { count: number(source.rows.length) })}</span></p>
    ${source.problem && html`<p class="bad" role="alert">${source.problem}</p>`}
  </div>`;
}

/**
 * Progress of a run. During the run, tokens/s is the whole engine's, from its counter.
 * Afterwards it is the run's own: the service counts the tokens of its outputs.
 */
function Figures({ run }) {
  const { metrics, at } = useStore(service);
  const [, tick] = useState(0);
  const rate = useRef({ at: 0, tokens: 0, value: NaN });
  useEffect(() => {
    if (run.ended) return undefined;
    const timer = setInterval(() => tick((count) => count + 1), COUNT_MS);
    return () => clearInterval(timer);
  }, [run, run.ended]);
  const tokens = metrics ? total(metrics, "rwkv_completion_tokens_total") : undefined;
  if (tokens !== undefined && at > rate.current.at) {
    const { at: before, tokens: known } = rate.current;
    rate.current = { at, tokens, value: before && tokens >= known ? ((tokens - known) * 1000) / (at - before) : NaN };
  }
  const seconds = ((run.ended || Date.now()) - run.started) / 1000;
  const done = run.rows.filter((row) => row.reason).length;
  const characters = run.rows.reduce((sum, row) => sum + row.output.length, 0);
  return html`<p class="figures" id="batch-figures" data-done=${done}>
    <b>${number(done)} / ${number(run.rows.length)}</b> ${t("batch.done")} ·
    <b id="batch-rate">${number(run.ended ? run.tokens / seconds : rate.current.value)}</b> ${t(run.ended ? "batch.ownTokens" : "batch.tokens")} ·
    <b>${number(characters / Math.max(seconds, 0.1))}</b> ${t("batch.characters")} · ${number(seconds, 1)} s</p>`;
}

function Whole({ row, close }) {
  const dialog = useRef();
  useEffect(() => {
    if (row && !dialog.current.open) dialog.current.showModal();
  }, [row]);
  return html`<dialog ref=${dialog} class="whole" aria-labelledby="whole-title" onClose=${close}>
    <h2 id="whole-title">${row ? t("batch.row", { index: row.index + 1 }) : ""}</h2>
    ${row && html`<pre tabindex="0">${row.prompt}</pre><pre tabindex="0" class="output">${row.error ?? row.output}</pre>`}
    <form method="dialog"><button class="main">${t("close")}</button></form>
  </dialog>`;
}

export function Batch() {
  useLanguage();
  const [template, setTemplate] = useState(TEMPLATES.chat);
  const [path, setPath] = useState(ROUTES[0]);
  const [most, setMost] = useState(200);
  const source = useSource();
  const [run, setRun] = useState(null);
  const [chosen, setChosen] = useState(null);
  const [filter, setFilter] = useState(FILTERS[0]);
  const place = useRef();
  const grid = useRef();
  useEffect(() => {
    grid.current = createGrid(place.current, setChosen);
  }, []);
  const start = async () => {
    const rows = rowsOf(source.rows, template);
    const begun = { rows, started: Date.now(), ended: 0, control: new AbortController() };
    grid.current.reset(rows);
    setRun(begun);
    const fields = { chunk_size: CHUNK_TOKENS, ...decodeFields(), ...chosenModel(), max_tokens: most };
    await runRows(path, fields, rows, begun.control.signal, grid.current.changed);
    const ended = Date.now();
    setRun({ ...begun, ended, tokens: NaN });
    const tokens = await countTokens(rows).catch(() => NaN);
    setRun((now) => (now.rows === rows ? { ...now, tokens } : now));
  };
  const busy = run && !run.ended;
  return html`<div class="batch">
    <div class="setup">
      <div class="field"><label for="batch-template">${t("batch.template")}</label>
        <textarea id="batch-template" rows="5" value=${template} onInput=${(event) => setTemplate(event.currentTarget.value)}></textarea>
        <p class="row">${Object.keys(TEMPLATES).map((name) => html`<button onClick=${() => setTemplate(TEMPLATES[name])}>${t(`template.${name}`)}</button>`)}</p>
      </div>
      <${Source} source=${source} />
      <div class="field">
        <label>${t("batch.route")} <select id="batch-route" value=${path} onChange=${(event) => setPath(event.currentTarget.value)}>${ROUTES.map((one) => html`<option selected=${one === path}>${one}</option>`)}</select></label>
        <label>${t("batch.most")} <input id="batch-most" type="number" min="1" value=${most} onChange=${(event) => setMost(Math.max(1, Number(event.currentTarget.value) || 1))} /></label>
        <${DecodeParameters} prefix="batch" />
        <p class="row">${busy
          ? html`<button id="batch-stop" onClick=${() => run.control.abort()}>${t("chat.stop")}</button>`
          : html`<button id="batch-start" class="main" disabled=${!source.rows.length} onClick=${start}>${t("batch.start")}</button>`}
          ${run?.ended && html`<button id="batch-jsonl" onClick=${() => download("results.jsonl", resultsAsJsonl(run.rows), "application/jsonl")}>JSONL ↓</button>
          <button onClick=${() => download("results.csv", resultsAsCsv(run.rows), "text/csv;charset=utf-8")}>CSV ↓</button>`}</p>
      </div>
    </div>
    ${run && html`<${Figures} run=${run} />
      <label>${t("batch.show")} <select id="batch-filter" value=${filter} onChange=${(event) => setFilter(event.currentTarget.value)}>${FILTERS.map((one) => html`<option value=${one} selected=${one === filter}>${t(`filter.${one}`)}</option>`)}</select></label>`}
    <div class="wall" data-filter=${filter} ref=${place} role="group" aria-label=${t("batch.results")}></div>
    <${Whole} row=${chosen} close=${() => setChosen(null)} />
  </div>`;
}
