// The batch panel: one template, many rows, answers as streams or in the background.

import { DecodeParameters, ModelChoice, chosenModel, decodeFields } from "../decode.js";
import { total } from "../dashboard/prometheus.js";
import { number, t, useLanguage } from "../i18n.js";
import { service } from "../monitor.js";
import { choice, download, fileHandlers, html, settings, useEffect, useRef, useState, useStore } from "../ui.js";
import { fillRows, getBatch, inputRows, isEnded, startBatch } from "./background.js";
import { createGrid, SORTS } from "./grid.js";
import { Runs } from "./runs.js";
import { countTokens, rowsOf, runRows } from "./run.js";
import { parseRows, resultsAsCsv, resultsAsJsonl } from "./table.js";

const TEMPLATES = {
  chat: "User: {line}\n\nAssistant: <think>\n</think>",
  translate: "English: {line}\n\nChinese:",
  raw: "{line}",
};
const ROUTES = ["/v1/chat/completions", "/v2/chat/completions", "/big_batch/completions"];
const COUNT_MS = 200;
const POLL_MS = 1000;
const WAYS = ["live", "background"];
/** What a row of typed text is. */
const UNITS = ["line", "block"];
/** Setting with the id of the background run that a reload opens again. */
const OPEN_RUN = "batch.run";
/** States of rows that the wall can show alone. */
const FILTERS = ["all", "running", "stop", "length", "stopped", "error"];
const CHUNK_TOKENS = 2;

/** Input of the rows: text or a file. */
function useSource() {
  const [lines, setLines] = useState("");
  const [unit, setUnit] = useState(UNITS[0]);
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
  return { lines, setLines, unit, setUnit, file, forget: () => setFile(null), take, problem, rows: file ? file.rows : parseRows(lines, "", unit === "block") };
}

function Source({ source }) {
  const input = useRef();
  const { choose, target } = fileHandlers(source.take);
  return html`<div class="field" ...${target}>
    <label for="batch-lines">${t("batch.lines")}</label>
    ${source.file
      ? html`<p class="row"><b>${source.file.name}</b> ${t("batch.columns", { names: Object.keys(source.file.rows[0] ?? {}).map((name) => `{${name}}`).join(" ") })}
          <button onClick=${source.forget}>${t("batch.forget")}</button></p>`
      : html`<textarea id="batch-lines" rows="5" value=${source.lines} placeholder=${t("batch.placeholder")} onInput=${(event) => source.setLines(event.currentTarget.value)}></textarea>`}
    <p class="row"><button onClick=${() => input.current.click()}>${t("batch.file")}</button>
      <input ref=${input} id="batch-file" type="file" hidden accept=".txt,.csv,.jsonl,.ndjson" aria-label=${t("batch.file")} onChange=${choose} />
      ${!source.file && choice("batch-unit", t("batch.unit"), source.unit, source.setUnit, UNITS, (one) => t(`unit.${one}`))}
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
  const counts = run.batch?.request_counts;
  const done = counts && !run.ended ? counts.completed + counts.failed : run.rows.filter((row) => row.reason).length;
  const characters = run.rows.reduce((sum, row) => sum + row.output.length, 0);
  const box = useRef();
  useEffect(() => {
    if (innerWidth <= 900) box.current.scrollIntoView();
  }, [run.started]);
  return html`<p class="figures" ref=${box} id="batch-figures" data-done=${done} data-ended=${Boolean(run.ended)}>
    <b>${number(done)} / ${number(run.rows.length)}</b> ${t("batch.done")} · ${" "}
    <b id="batch-rate">${number(run.ended ? run.tokens / seconds : rate.current.value)}</b> ${t(run.ended ? "batch.ownTokens" : "batch.tokens")} · ${" "}
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

/** The visible run: `start(values, template, path, way, most)`, `reopen(batch)`, `stop()`. */
function useRun(grid) {
  const [run, setRun] = useState(null);
  const [problem, setProblem] = useState("");
  const current = useRef(null);
  const show = (next) => {
    current.current = next;
    setRun(next);
  };
  const end = async (begun, count) => {
    const ended = { ...begun, ended: Date.now(), tokens: NaN };
    grid.current.settled();
    show(ended);
    const tokens = await count().catch(() => NaN);
    if (current.current === ended) show({ ...ended, tokens });
  };
  /** Poll a batch until it ends, then load its answers. */
  const follow = async (begun) => {
    let batch = begun.batch;
    while (!isEnded(batch) && current.current?.rows === begun.rows) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      batch = await getBatch(batch.id).catch((error) => (error.status === 404 ? Promise.reject(error) : batch));
      if (current.current?.rows === begun.rows) show({ ...begun, batch });
    }
    if (current.current?.rows !== begun.rows) return;
    const tokens = await fillRows(batch, begun.rows);
    if (batch.errors) setProblem(batch.errors.data.map((one) => one.message).join(" "));
    const ends = batch.completed_at ?? batch.cancelled_at ?? batch.failed_at ?? batch.expired_at;
    grid.current.settled();
    show({ ...begun, batch, started: batch.created_at * 1000, ended: ends * 1000, tokens });
  };
  const guarded = async (work) => {
    setProblem("");
    try {
      await work();
    } catch (error) {
      settings.set(OPEN_RUN, "");
      setProblem(error.message || t("notice.offline"));
    }
  };
  const begin = (rows, more) => {
    const begun = { rows, started: Date.now(), ended: 0, ...more };
    grid.current.reset(rows);
    show(begun);
    return begun;
  };
  const reopen = (batch) => guarded(async () => {
    settings.set(OPEN_RUN, batch.id);
    await follow(begin(await inputRows(batch), { batch, started: batch.created_at * 1000 }));
  });
  const start = (rows, path, way, fields) => guarded(async () => {
    if (way === "background") {
      const { chunk_size: _, ...sent } = fields;
      const batch = await startBatch(path, sent, rows);
      settings.set(OPEN_RUN, batch.id);
      return follow(begin(rows, { batch }));
    }
    settings.set(OPEN_RUN, "");
    const begun = begin(rows, { control: new AbortController() });
    await runRows(path, fields, rows, begun.control.signal, grid.current.changed);
    return end(begun, () => countTokens(rows));
  });
  useEffect(() => {
    const id = settings.get(OPEN_RUN);
    if (id) guarded(async () => reopen(await getBatch(id)));
  }, []);
  return { run, problem, start, reopen };
}

export function Batch({ visible }) {
  useLanguage();
  const [template, setTemplate] = useState(TEMPLATES.chat);
  const [path, setPath] = useState(ROUTES[0]);
  const [way, setWay] = useState(WAYS[0]);
  const [most, setMost] = useState(200);
  const source = useSource();
  const [chosen, setChosen] = useState(null);
  const [filter, setFilter] = useState(FILTERS[0]);
  const [sort, setSort] = useState(SORTS[0]);
  const place = useRef();
  const grid = useRef();
  useEffect(() => {
    grid.current = createGrid(place.current, setChosen);
  }, []);
  const { run, problem, start, reopen } = useRun(grid);
  useEffect(() => grid.current.arrange(filter, sort), [filter, sort]);
  const begin = () => start(rowsOf(source.rows, template), path, way, { chunk_size: CHUNK_TOKENS, ...decodeFields(), ...chosenModel(), max_tokens: most });
  const live = run?.control && !run.ended;
  return html`<div class="batch">
    <div class="setup">
      <div class="field"><label for="batch-template">${t("batch.template")}</label>
        <textarea id="batch-template" rows="5" aria-describedby="batch-template-hint" value=${template} onInput=${(event) => setTemplate(event.currentTarget.value)}></textarea>
        <small id="batch-template-hint">${t("batch.templateHint")}</small>
        <p class="row">${Object.keys(TEMPLATES).map((name) => html`<button onClick=${() => setTemplate(TEMPLATES[name])}>${t(`template.${name}`)}</button>`)}</p>
      </div>
      <${Source} source=${source} />
      <div class="field">
        ${choice("batch-way", t("batch.way"), way, setWay, WAYS, (one) => t(`way.${one}`))}
        ${choice("batch-route", t("batch.route"), path, setPath, ROUTES, (one) => one)}
        <small>${t(`route.${ROUTES.indexOf(path)}`)}</small>
        <label>${t("batch.most")} <input id="batch-most" type="number" min="1" value=${most} onChange=${(event) => setMost(Math.max(1, Number(event.currentTarget.value) || 1))} /></label>
        <${ModelChoice} prefix="batch" visible=${visible} />
        <${DecodeParameters} prefix="batch" />
        <p class="row">${live
          ? html`<button id="batch-stop" onClick=${() => run.control.abort()}>${t("chat.stop")}</button>`
          : html`<button id="batch-start" class="main" disabled=${!source.rows.length} onClick=${begin}>${t("batch.start", { count: number(source.rows.length) })}</button>`}
          ${run?.ended && html`<button id="batch-jsonl" onClick=${() => download("results.jsonl", resultsAsJsonl(run.rows), "application/jsonl")}>JSONL ↓</button>
          <button id="batch-csv" onClick=${() => download("results.csv", resultsAsCsv(run.rows), "text/csv;charset=utf-8")}>CSV ↓</button>`}</p>
      </div>
    </div>
    <${Runs} visible=${visible} open=${run?.batch} reopen=${reopen} />
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    ${run && html`<${Figures} run=${run} />
      <p class="row">${choice("batch-filter", t("batch.show"), filter, setFilter, FILTERS, (one) => t(`filter.${one}`))}
      ${choice("batch-sort", t("batch.sort"), sort, setSort, SORTS, (one) => t(`sort.${one}`))}</p>`}
    <div class="wall" hidden=${!run} ref=${place} role="group" tabindex="0" aria-label=${t("batch.results")}></div>
    <${Whole} row=${chosen} close=${() => setChosen(null)} />
  </div>`;
}
