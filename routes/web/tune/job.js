// One tuning: progress, loss curve, answers before and after, publication.

import { loadChoices } from "../decode.js";
import { duration, number, t } from "../i18n.js";
import { service } from "../monitor.js";
import { html, useEffect, useState, useStore } from "../ui.js";
import { LossCurve, lossesOf } from "./curve.js";
import { answerOf, changeJob, eventsOf, isEnded, publish, removeModel } from "./jobs.js";

const POLL_MS = 1000;

/** Answers of the model and of the tuned model to the same message, side by side. */
function Compare({ job, example }) {
  const [text, setText] = useState(example);
  const [answers, setAnswers] = useState(null);
  const [problem, setProblem] = useState("");
  const ask = async (event) => {
    event.preventDefault();
    setProblem("");
    setAnswers(["…", "…"]);
    try {
      setAnswers(await Promise.all([job.base, job.model].map((model) => answerOf(model, text))));
    } catch (error) {
      setAnswers(null);
      setProblem(error.message || t("notice.offline"));
    }
  };
  return html`<form onSubmit=${ask}><label for="tune-ask">${t("tune.ask")}</label>
    <textarea id="tune-ask" rows="2" value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea>
    <p><button class="main" id="tune-compare" disabled=${!text.trim()}>${t("tune.compare")}</button></p>
    ${answers && html`<div class="panes" id="tune-answers">${["before", "after"].map((when, at) => html`<div class="figures-box"><h3>${t(`tune.${when}`)}</h3><p class="answer">${answers[at]}</p></div>`)}</div>`}
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
  </form>`;
}

function Publish({ job }) {
  const [name, setName] = useState("");
  const [done, setDone] = useState(null);
  const { status } = useStore(service);
  if (!status?.processes || (job.tuning !== "lora" && !job.result_files[1])) return html`<p class="quiet">${t("tune.own", { model: job.model })}</p>`;
  const submit = async (event) => {
    event.preventDefault();
    try {
      await publish(job, name.trim());
      await loadChoices();
      setDone({ text: t(`published.${job.tuning}`, { name: name.trim() }), good: true });
    } catch (error) {
      setDone({ text: error.message || t("notice.offline"), good: false });
    }
  };
  return html`<form class="row" onSubmit=${submit}><label>${t("tune.publishAs")} <input id="tune-name" required maxlength="64" pattern="[A-Za-z0-9._\\-]+" value=${name} onInput=${(event) => setName(event.currentTarget.value)} /></label>
    <button id="tune-publish">${t("tune.publish")}</button>
    <span role="status" class=${done?.good ? "good" : "bad"}>${done?.text ?? ""}</span></form>`;
}

/** Steps and time left of a running job. */
function Progress({ job, events }) {
  const { step, total_steps: total } = events.findLast((event) => event.data?.total_steps)?.data ?? {};
  const left = job.estimated_finish - Date.now() / 1000;
  return html`<p class="row"><progress max=${total ?? 1} value=${step} aria-label=${t("translate.progress")}></progress>
    ${total && html`<span>${number(step)} / ${number(total)}</span>`}
    ${job.estimated_finish && html`<span id="tune-left">${t("tune.left", { time: duration(left) })}</span>`}</p>`;
}

/** `changed()` after the job has changed. */
export function Job({ job, example, changed, visible }) {
  const [events, setEvents] = useState([]);
  const [problem, setProblem] = useState("");
  const ended = isEnded(job);
  useEffect(() => {
    if (!visible) return undefined;
    const load = () => eventsOf(job).then(setEvents, () => {});
    load();
    const timer = ended ? 0 : setInterval(load, POLL_MS);
    return () => clearInterval(timer);
  }, [job.id, ended, visible]);
  const act = (work) => work().then(() => setProblem(""), (error) => setProblem(error.message || t("notice.offline"))).then(changed);
  const actions = { running: ["pause", "cancel"], queued: ["pause", "cancel"], paused: ["resume", "cancel"] }[job.status] ?? [];
  const warnings = events.filter((event) => event.level === "warn");
  const remove = () => confirm(t("admin.confirm", { name: job.model })) && act(() => removeModel(job.model));
  return html`<section class="figures-box wide" id="tune-job" data-status=${job.status} aria-label=${job.fine_tuned_model ?? job.id}>
    <h2>${job.fine_tuned_model ?? (job.user_provided_suffix || job.id)}</h2>
    <p class="row"><b role="status">${t(`job.${job.status}`)}</b><span class="space"></span>
      ${actions.map((action) => html`<button onClick=${() => act(() => changeJob(job, action))}>${t(`tune.${action}`)}</button>`)}
      ${job.model && html`<button onClick=${remove}>${t("admin.do.remove")}</button>`}</p>
    ${job.status === "running" && html`<${Progress} job=${job} events=${events} />`}
    ${job.error && html`<pre class="bad">${job.error.message}</pre>`}
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    ${warnings.length > 0 && html`<ul>${warnings.map((event) => html`<li>${event.message}</li>`)}</ul>`}
    <${LossCurve} losses=${lossesOf(events)} />
    ${events.length > 0 && html`<details><summary>${t("tune.events", { count: number(events.length) })}</summary><ul>${events.map((event) => html`<li>${event.message}</li>`)}</ul></details>`}
    ${job.model && html`<${Compare} key=${job.id} job=${job} example=${example} /><${Publish} key=${`${job.id} publish`} job=${job} />`}
  </section>`;
}
