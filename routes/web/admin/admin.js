// The panel of the administrator: models, tuned states, adapters, engines, sessions, jobs and clients of the service.

import { json, post, postForm, request } from "../api.js";
import { TIERS } from "../chat/sessions.js";
import { parseMetrics, total } from "../dashboard/prometheus.js";
import { duration, locale, number, t, useLanguage } from "../i18n.js";
import { firstTier, service } from "../monitor.js";
import { html, useEffect, useRef, useState } from "../ui.js";

const PAGE = 50;
const POLL_MS = 2000;
/** Limits of an API key. */
const LIMITS = ["rows", "tokens_per_minute", "requests_per_minute"];

const listOf = (path) => async () => (await json(path)).data;
const deleteAt = (path) => (name) => request(`${path}/${encodeURIComponent(name)}`, { method: "DELETE" });

/** Send a form whose file is `upload`. */
const uploadTo = (path) => ({ upload, ...values }) => postForm(path, { ...values, content: upload });

/**
 * Each kind: `list()` -> entries, `name(entry)`, `about(entry)` -> text, `actions`: name -> act(name), none if
 * `isEnded(entry)` or `isFixed(entry)`, `fields` of the form that adds one (the file is uploaded), `add(values)`.
 */
const KINDS = {
  models: {
    list: listOf("/v1/models"),
    name: (entry) => entry.id,
    about: ({ id, status, loaded, created, error, file }) => [
      status && t(`status.${status}`), status === "loading" && `${number(100 * loaded)} % · ${duration(Date.now() / 1000 - created)}`, error,
      file ?? (id === service.get().status?.model && service.get().status.model_file),
    ].filter(Boolean).join(" · "),
    isFixed: ({ status }) => !status,
    actions: { unload: (name) => post("/v1/models/unload", { name }) },
    fields: ["name", "file"],
    add: (values) => post("/v1/models/load", values),
  },
  states: {
    list: listOf("/v1/states"),
    name: (entry) => entry.name,
    about: ({ file }) => (file === "sent" ? t("admin.sent") : file ?? ""),
    actions: { remove: deleteAt("/v1/states") },
    fields: ["name", "upload"],
    add: uploadTo("/v1/states"),
  },
  adapters: {
    list: listOf("/v1/adapters"),
    name: (entry) => entry.name,
    about: (entry) => entry.file ?? "",
    actions: { remove: deleteAt("/v1/adapters") },
    fields: ["name", "upload", "scale"],
    add: uploadTo("/v1/adapters"),
  },
  engines: {
    list: listOf("/v1/engines"),
    name: (entry) => entry.id,
    about: ({ status, devices = [] }) => [t(`status.${status}`), ...(devices[0] === "auto" ? service.get().status?.devices ?? [] : devices)].join(" · "),
    actions: { restart: (engine) => post("/v1/engines/restart", { engine }) },
  },
  sessions: {
    list: async () => (await post("/state/status", { limit: 10_000 })).sessions,
    name: (entry) => entry.session_id,
    about: (entry) => {
      const tier = TIERS[entry.cache_level.slice(0, 2)];
      return `${new Date(entry.timestamp * 1000).toLocaleString(locale())} · ${t(`tier.${tier === "vram" ? firstTier(service.get()) : tier}`)}`;
    },
    actions: { remove: (id) => post("/state/delete", { session_id: id }) },
  },
  batches: {
    list: listOf("/openai/v1/batches?limit=100"),
    name: (entry) => entry.id,
    about: ({ status, endpoint, request_counts: counts }) => `${t(`run.${status}`)} · ${counts.completed + counts.failed} / ${counts.total} · ${endpoint}`,
    actions: { cancel: (id) => post(`/openai/v1/batches/${id}/cancel`, {}) },
    isEnded: (entry) => !["validating", "in_progress", "finalizing"].includes(entry.status),
  },
  tunings: {
    list: listOf("/openai/v1/fine_tuning/jobs?limit=50"),
    name: (entry) => entry.id,
    about: (entry) => [
      t(`job.${entry.status}`), entry.fine_tuned_model ?? entry.user_provided_suffix, entry.estimated_finish && t("tune.left", { time: duration(entry.estimated_finish - Date.now() / 1000) }),
    ].filter(Boolean).join(" · "),
    actions: { cancel: (id) => post(`/openai/v1/fine_tuning/jobs/${id}/cancel`, {}) },
    isEnded: (entry) => ["succeeded", "failed", "cancelled"].includes(entry.status),
  },
  clients: {
    list: async () => {
      const [text, status] = await Promise.all(["/metrics", "/status"].map((path) => request(path).then((answer) => answer.text())));
      const metrics = parseMetrics(text);
      const keys = new Map(JSON.parse(status).keys.map((key) => [key.name, key]));
      const names = new Set([...keys.keys(), ...(metrics.get("rwkv_client_requests_total") ?? []).map((one) => one.labels.client)]);
      return [...names].map((client) => ({ client, metrics, key: keys.get(client) }));
    },
    name: (entry) => entry.client,
    about: ({ client, metrics, key }) => {
      const count = (name, wanted) => number(total(metrics, `rwkv_client_${name}_total`, { client, ...wanted }) ?? 0);
      const use = t("admin.use", {
        taken: count("requests", { outcome: "taken" }), refused: count("requests", { outcome: "refused" }),
        read: count("tokens", { kind: "prompt" }), written: count("tokens", { kind: "completion" }),
      });
      const limits = LIMITS.filter((name) => key?.[name]).map((name) => t(`limit.${name}`, { count: number(key[name]) }));
      return [use, ...(key?.admin ? [t("admin.rights")] : []), ...limits].join(" · ");
    },
    actions: {},
  },
};

function AddForm({ kind, done }) {
  const { fields, add } = KINDS[kind];
  const [file, setFile] = useState("");
  const input = useRef();
  const submit = async (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    if (await done(() => add(Object.fromEntries(new FormData(form))))) form.reset();
  };
  return html`<form class="row" onSubmit=${submit} onReset=${() => setFile("")}>
    ${fields.map((field) => field === "upload"
      ? html`<span key=${field}>${t("admin.field.upload")} <button type="button" onClick=${() => input.current.click()}>${t("batch.file")}</button> <b>${file}</b>
        <input ref=${input} name=${field} type="file" hidden aria-label=${t("admin.field.upload")} onChange=${(event) => setFile(event.currentTarget.files[0]?.name ?? "")} /></span>`
      : html`<label key=${field}>${t(`admin.field.${field}`)}
        <input name=${field} type=${field === "scale" ? "number" : "text"} step="any" defaultValue=${field === "scale" ? 1 : ""} required /></label>`)}
    <button disabled=${fields.includes("upload") && !file}>${t("admin.add")}</button>
  </form>`;
}

function Kind({ kind, visible }) {
  const { list, name, about, actions, isEnded, isFixed, fields } = KINDS[kind];
  const [entries, setEntries] = useState([]);
  const [wanted, setWanted] = useState("");
  const [shown, setShown] = useState(PAGE);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const [byName, setByName] = useState(false);
  const run = async (act) => {
    setBusy(true);
    setProblem("");
    let succeeded = true;
    try {
      await act();
    } catch (error) {
      setProblem(error.message || t("notice.offline"));
      succeeded = false;
    }
    setBusy(false);
    if (succeeded) setEntries(await list().catch(() => entries));
    return succeeded;
  };
  useEffect(() => {
    if (visible) run(async () => {});
  }, [visible]);
  const isMoving = entries.some((entry) => (isEnded ? !isEnded(entry) : entry.status === "loading"));
  useEffect(() => {
    if (!visible || !isMoving) return undefined;
    const timer = setInterval(() => list().then(setEntries, () => {}), POLL_MS);
    return () => clearInterval(timer);
  }, [visible, isMoving]);
  const found = entries.filter((entry) => name(entry).toLowerCase().includes(wanted.trim().toLowerCase()));
  if (byName) found.sort((one, other) => name(one).localeCompare(name(other)));
  const confirmed = (action, one) => ["restart", "cancel"].includes(action) || confirm(t("admin.confirm", { name: one }));
  return html`<section class="figures-box" aria-label=${t(`admin.${kind}`)} aria-busy=${busy} id="admin-${kind}" hidden=${!fields && !entries.length}>
    <h2>${t(`admin.${kind}`)} (${found.length})</h2>
    ${entries.length > 5 && html`<input type="search" aria-label=${t("admin.search")} placeholder=${t("admin.search")} value=${wanted} onInput=${(event) => setWanted(event.currentTarget.value)} />
      <label><input type="checkbox" checked=${byName} onChange=${(event) => setByName(event.currentTarget.checked)} /> ${t("admin.byName")}</label>`}
    <ul class="plainlist">${found.slice(0, shown).map((entry) => html`<li key=${name(entry)} class="row">
      <b>${name(entry)}</b> <small>${about(entry)}</small><span class="space"></span>
      ${Object.entries((isEnded ?? isFixed)?.(entry) ? {} : actions).map(([action, act]) => html`<button disabled=${busy} onClick=${() => confirmed(action, name(entry)) && run(() => act(name(entry)))}
        aria-label="${t(`admin.do.${action}`)} ${name(entry)}">${t(`admin.do.${action}`)}</button>`)}
    </li>`)}</ul>
    ${found.length > shown && html`<button onClick=${() => setShown(shown + PAGE)}>${t("more")}</button>`}
    ${fields && html`<${AddForm} kind=${kind} done=${run} />`}
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
  </section>`;
}

export function Admin({ visible }) {
  useLanguage();
  return html`<div class="admin">${Object.keys(KINDS).map((kind) => html`<${Kind} key=${kind} kind=${kind} visible=${visible} />`)}</div>`;
}
