// The dashboard: /metrics and /status, current and over the last hour, and the last requests.

import { number, t, useLanguage } from "../i18n.js";
import { firstTier, service } from "../monitor.js";
import { html, useStore } from "../ui.js";
import { Plot } from "./plot.js";
import { total } from "./prometheus.js";
import { Requests } from "./requests.js";

const MIB = 1024 * 1024;

/** A table of names and values; `figures`: [label, value, metric's name]. */
function Figures({ title, figures }) {
  const known = figures.filter(([, value]) => value !== undefined && value !== null);
  if (!known.length) return null;
  return html`<section class="figures-box"><h2>${title}</h2><table><tbody>
    ${known.map(([label, value, metric]) => html`<tr><th scope="row">${label}</th><td data-metric=${metric}>${typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 1) : value}</td></tr>`)}
  </tbody></table></section>`;
}

/** A tier's sessions with the size of their states. */
function tier(metrics, level, label) {
  const [sessions, bytes] = ["sessions", "bytes"].map((unit) => total(metrics, `rwkv_pool_${level}_${unit}`));
  return [
    [label, sessions, `rwkv_pool_${level}_sessions`],
    [t("dash.mib", { label }), bytes === undefined ? bytes : bytes / MIB, `rwkv_pool_${level}_bytes`],
  ];
}

function diskMib(metrics) {
  const bytes = total(metrics, "rwkv_pool_database_used_bytes");
  return bytes === undefined ? bytes : bytes / MIB;
}

/** Share of prompts that began with a cached prefix. undefined without prompts. */
function hitRate(metrics) {
  const [hits, misses] = ["hits", "misses"].map((name) => total(metrics, `rwkv_pool_prefix_cache_${name}`) ?? 0);
  return hits + misses ? `${number((100 * hits) / (hits + misses))} %` : undefined;
}

/** Values by a label, summed over all engines. */
function labelled(metrics, name, label, text) {
  const by = new Map();
  for (const { labels, value } of metrics.get(name) ?? []) by.set(labels[label], (by.get(labels[label]) ?? 0) + value);
  return [...by].map(([value, sum]) => [text(value), sum, `${name}:${value}`]);
}

function deviceFigures(metrics) {
  const engines = new Set((metrics.get("rwkv_device_memory_used_bytes") ?? []).map(({ labels }) => labels.engine));
  const device = (labels) => (engines.size > 1 ? `${labels.engine}, ${labels.device}` : labels.device);
  const of = (name, unit, factor) =>
    (metrics.get(name) ?? []).map(({ labels, value }) => [`${device(labels)}: ${t(`device.${unit}`)}`, value / factor, `${name}:${labels.device}`]);
  return [
    ...of("rwkv_device_memory_used_bytes", "used", MIB).map(([label, value, metric]) => [label, Math.round(value), metric]),
    ...of("rwkv_device_memory_total_bytes", "total", MIB).map(([label, value, metric]) => [label, Math.round(value), metric]),
    ...of("rwkv_device_power_watts", "power", 1),
  ];
}

function Refused({ title, entries }) {
  const list = Object.entries(entries ?? {});
  return list.length ? html`<h3>${title}</h3><ul>${list.map(([name, why]) => html`<li><b>${name}</b>: ${why}</li>`)}</ul>` : null;
}

/** A table of the engines. */
function Engines({ engines }) {
  const columns = ["engine", "state", "process", "devices", "rows", "unread", "kept"];
  return html`<section class="figures-box wide"><h2>${t("dash.engines")}</h2><table>
    <thead><tr>${columns.map((name) => html`<th scope="col">${t(`dash.${name}`)}</th>`)}</tr></thead>
    <tbody>${engines.map((one) => html`<tr data-engine=${one.engine}>
      <th scope="row">${one.engine}</th><td>${one.status}</td><td>${[one.node, one.pid || ""].filter(Boolean).join(" · ")}</td><td>${one.devices.join(", ")}</td>
      <td>${number(one.rows)}</td><td>${number(one.queued_prompt_tokens)}</td><td>${number(one.sessions)}</td>
    </tr>`)}</tbody>
  </table></section>`;
}

function Machine({ status }) {
  const workers = status.processes?.http_workers ?? [];
  const shown = (value) => (typeof value === "object" && value ? Object.values(value).join(", ") : value);
  return html`<section class="figures-box wide"><h2>${t("dash.machine")}</h2><table><tbody>
    ${[
      [t("dash.model"), [status.model, status.model_file].filter(Boolean).join(" · ")],
      [t("dash.device"), (status.devices ?? []).join(", ")],
      [t("dash.dtype"), status.dtype],
      [t("dash.samplers"), shown(status.samplers?.used)],
      [t("dash.kernels"), shown(status.kernels?.used)],
      [t("dash.workers"), workers.map((one) => `${one.name} (${one.pid}, ${number(one.jobs)} ${t("dash.jobs")})`).join(", ")],
      [t("dash.up"), status.processes ? `${number(status.processes.engine.up_s)} s` : ""],
    ].filter(([, value]) => value).map(([label, value]) => html`<tr><th scope="row">${label}</th><td>${value}</td></tr>`)}
  </tbody></table>
  <${Refused} title=${t("dash.refusedSamplers")} entries=${status.samplers?.refused} />
  <${Refused} title=${t("dash.refusedKernels")} entries=${status.kernels?.refused} />
  </section>`;
}

export function Dashboard({ visible }) {
  useLanguage();
  const { metrics, status } = useStore(service);
  const of = (name) => (metrics ? total(metrics, name) : undefined);
  const one = (key, name) => [t(key), of(name), name];
  return html`<div class="dashboard">
    <div class="plots">
      <${Plot} title=${t("dash.tokens")} names=${["generated", "read"]} labels=${[t("dash.generated"), t("dash.read")]} unit="/s" visible=${visible} />
      <${Plot} title=${t("dash.rows")} names=${["running", "waiting"]} labels=${[t("dash.running"), t("dash.waiting")]} unit="" visible=${visible} />
      <${Plot} title=${t("dash.first")} names=${["first_p50", "first_p95"]} labels=${["p50", "p95"]} unit="ms" visible=${visible} />
      <${Plot} title=${t("dash.between")} names=${["between_p50", "between_p95"]} labels=${["p50", "p95"]} unit="ms" digits=${1} visible=${visible} />
    </div>
    ${metrics && html`<div class="boxes">
      <${Figures} title=${t("dash.totals")} figures=${[
        one("dash.generatedTokens", "rwkv_completion_tokens_total"), one("dash.promptTokens", "rwkv_prompt_tokens_total"),
        one("dash.cachedTokens", "rwkv_cached_prompt_tokens_total"), one("dash.running", "rwkv_running_rows"), one("dash.waiting", "rwkv_waiting_rows"),
      ]} />
      <${Figures} title=${t("dash.sessions")} figures=${[
        one("dash.kept", "rwkv_pool_sessions"), ...tier(metrics, "l1", t(firstTier({ status }) === "vram" ? "dash.vram" : "dash.memory")), ...tier(metrics, "l2", t("dash.ram")),
        [t("dash.disk"), diskMib(metrics), "rwkv_pool_database_used_bytes"], one("dash.slotsFree", "rwkv_pool_slots_free"), one("dash.slots", "rwkv_pool_slots_total"),
      ]} />
      <${Figures} title=${t("dash.prefix")} figures=${[
        one("dash.hits", "rwkv_pool_prefix_cache_hits"), one("dash.misses", "rwkv_pool_prefix_cache_misses"),
        [t("dash.hitRate"), hitRate(metrics), "hit-rate"], one("dash.saved", "rwkv_pool_prefix_cache_saved_tokens"),
      ]} />
      <${Figures} title=${t("dash.devices")} figures=${deviceFigures(metrics)} />
      <${Figures} title=${t("dash.requests")} figures=${labelled(metrics, "rwkv_http_requests_total", "status", (status) => `HTTP ${status}`).sort()} />
      <${Figures} title=${t("dash.ended")} figures=${[
        ...labelled(metrics, "rwkv_rows_finished_total", "reason", (reason) => reason),
        ...labelled(metrics, "rwkv_jobs_refused_total", "kind", (kind) => t("dash.refused", { kind })),
      ]} />
    </div>`}
    ${status?.processes && html`<${Requests} visible=${visible} />`}
    ${status?.engines?.length > 1 && html`<${Engines} engines=${status.engines} />`}
    ${status && html`<${Machine} status=${status} />`}
    ${status && !status.processes && html`<p>${t("dash.admin")}</p>`}
  </div>`;
}
