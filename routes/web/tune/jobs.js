// Client of OpenAI's fine-tuning API: files, jobs, events, models.

import { json, post, postForm, request } from "../api.js";

const API = "/openai/v1";
const JOBS = `${API}/fine_tuning/jobs`;
const MAX_EVENTS = 1000;

export const isEnded = (job) => ["succeeded", "failed", "cancelled"].includes(job.status);
/** Upload examples. An ApiError's message has a line per error. */
export const upload = (file) => postForm(`${API}/files`, { purpose: "fine-tune", file });

export const createJob = (fields) => post(JOBS, { model: "rwkv7", ...fields });
/** The jobs, newest first. `model`: the name of their tuned model while it is served, else null. */
export async function listJobs() {
  const [jobs, models] = await Promise.all([json(`${JOBS}?limit=50`), json(`${API}/models`)]);
  const served = new Set(models.data.map((one) => one.id));
  return jobs.data.map((job) => ({ ...job, base: job.model, model: served.has(job.fine_tuned_model) ? job.fine_tuned_model : null }));
}

/** The events, oldest first. */
export const eventsOf = async (job) => (await json(`${JOBS}/${job.id}/events?limit=${MAX_EVENTS}`)).data.reverse();
export const changeJob = (job, action) => post(`${JOBS}/${job.id}/${action}`, {});
export const removeModel = (name) => request(`${API}/models/${encodeURIComponent(name)}`, { method: "DELETE" });

/** Serve a job's state and LoRA to every key under `name`. Needs admin rights. */
export async function publish(job, name) {
  if (job.tuning !== "state") await post("/v1/adapters", { name, job: job.id });
  if (job.tuning === "lora") return;
  const content = await (await request(`${API}/files/${job.result_files[1]}/content`)).blob();
  await postForm("/v1/states", { name, content: new File([content], "tuned.state.pth") });
}

/** The model's most probable answer to a message. */
export async function answerOf(model, text, signal) {
  const body = { model, messages: [{ role: "user", content: text }], temperature: 0, max_tokens: 200 };
  return (await post(`${API}/chat/completions`, body, signal)).choices[0].message.content;
}
