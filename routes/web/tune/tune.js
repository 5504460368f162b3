// The tuning panel: examples, jobs, and the chosen job.

import { parseRows } from "../batch/table.js";
import { locale, number, t, useLanguage } from "../i18n.js";
import { choice, fileHandlers, html, settings, usePolling, useRef, useState } from "../ui.js";
import { Job } from "./job.js";
import { createJob, listJobs, upload } from "./jobs.js";

const POLL_MS = 2000;
const WAYS = ["state", "lora", "state+lora"];
const PREVIEW = 3;
const MAX_EXAMPLE = 300;

/** The first question and the last answer of an example. */
function exampleOf(row) {
  try {
    const messages = JSON.parse(row.messages);
    return { question: messages.find((one) => one.role === "user").content, answer: messages.at(-1).content };
  } catch {
    const [first = "", second = ""] = Object.values(row);
    return { question: row.prompt ?? first, answer: row.completion ?? second };
  }
}

/** The first two texts of each entry of a TMX file, by language. */
const tmxRows = (text) =>
  [...new DOMParser().parseFromString(text, "application/xml").querySelectorAll("tu")].map((entry) =>
    Object.fromEntries([...entry.querySelectorAll("tuv")].slice(0, 2).map((one, at) => [at, one.querySelector("seg")?.textContent ?? ""])));

const short = (text) => String(text ?? "").slice(0, MAX_EXAMPLE);

function Examples({ file, take, problems }) {
  const input = useRef();
  const { choose, target } = fileHandlers(take);
  return html`<div class="field drop" ...${target}>
    <p>${t("tune.drop")}</p>
    <p class="row"><button onClick=${() => input.current.click()}>${t("batch.file")}</button>
      <input ref=${input} id="tune-file" type="file" hidden accept=".jsonl,.csv,.tmx" aria-label=${t("batch.file")} onChange=${choose} />
      ${file && html`<b>${file.name}</b> <span class="quiet">${t("tune.lines", { count: number(file.rows.length) })}</span>`}</p>
    ${file && html`<ul class="plainlist" id="tune-preview">${file.rows.slice(0, PREVIEW).map(exampleOf).map(({ question, answer }) => html`<li>${short(question)} → <b>${short(answer)}</b></li>`)}</ul>`}
    ${problems.length > 0 && html`<div role="alert" class="bad"><p>${problems[0]}</p><ul id="tune-errors">${problems.slice(1).map((line) => html`<li>${line}</li>`)}</ul></div>`}
  </div>`;
}

export function Tune({ visible }) {
  useLanguage();
  const [file, setFile] = useState(null);
  const [problems, setProblems] = useState([]);
  const [way, setWay] = useState(WAYS[0]);
  const [suffix, setSuffix] = useState("");
  const [epochs, setEpochs] = useState("");
  const [busy, setBusy] = useState(false);
  const [jobs, setJobs] = useState([]);
  const [shown, setShown] = useState("");
  const load = () => listJobs().then(setJobs, () => {});
  usePolling(load, POLL_MS, visible);
  const guarded = async (work) => {
    setBusy(true);
    setProblems([]);
    await work().catch((error) => setProblems((error.message || t("notice.offline")).split("\n")));
    setBusy(false);
  };
  const take = (one) => guarded(async () => {
    let rows = [];
    try {
      rows = /\.tmx$/i.test(one.name) ? tmxRows(await one.text()) : parseRows(await one.text(), one.name);
    } catch {
      // the upload names all errors of the file
    }
    setFile({ name: one.name, rows, id: null });
    setFile({ name: one.name, rows, id: (await upload(one)).id });
  });
  const start = () => guarded(async () => {
    const fields = { training_file: file.id, suffix, tuning: way };
    if (epochs) fields.hyperparameters = { n_epochs: Number(epochs) };
    const job = await createJob(fields);
    settings.set(`question.${job.id}`, short(exampleOf(file.rows[0] ?? {}).question));
    setShown(job.id);
    await load();
  });
  const job = jobs.find((one) => one.id === shown) ?? jobs[0];
  const when = (one) => new Date(one.created_at * 1000).toLocaleString(locale(), { dateStyle: "short", timeStyle: "medium" });
  return html`<div class="tune batch"><p>${t("tune.about")}</p><div class="setup">
    <${Examples} file=${file} take=${take} problems=${problems} />
    <div class="field">
      ${choice("tune-way", t("tune.way"), way, setWay, WAYS, (one) => t(`way.${one}`))}
      <label>${t("tune.suffix")} <input id="tune-suffix" maxlength="64" value=${suffix} onInput=${(event) => setSuffix(event.currentTarget.value)} /></label>
      <label>${t("tune.epochs")} <input id="tune-epochs" type="number" min="1" max="1000" placeholder=${t("tune.auto")} value=${epochs} onInput=${(event) => setEpochs(event.currentTarget.value)} /></label>
      <p><button class="main" id="tune-start" disabled=${busy || !file?.id} onClick=${start}>${t("tune.start", { count: number(file?.rows.length ?? 0) })}</button></p>
    </div></div>
    ${jobs.length > 1 && html`<label>${t("tune.jobs")} <select id="tune-jobs" value=${job.id} onChange=${(event) => setShown(event.currentTarget.value)}>
      ${jobs.map((one) => html`<option value=${one.id} selected=${one.id === job.id}>${when(one)} · ${t(`job.${one.status}`)} · ${one.fine_tuned_model ?? one.id}</option>`)}</select></label>`}
    ${job && html`<${Job} key=${job.id} job=${job} example=${settings.get(`question.${job.id}`) ?? ""} changed=${load} visible=${visible} />`}
  </div>`;
}
