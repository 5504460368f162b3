// The last requests of the access log with a filter, and the reasons of errors.

import { json } from "../api.js";
import { number, t } from "../i18n.js";
import { INTERVAL_MS } from "../monitor.js";
import { clock } from "./plot.js";
import { choice, html, usePolling, useState } from "../ui.js";

const SHOWN = 50;
const KINDS = ["all", "errors", "generated"];

const isError = (entry) => entry.status >= 400 || entry.outcome !== "done";
const reasonOf = (entry) => (isError(entry) ? entry.refused?.message ?? entry.outcome : "");
const IS_KIND = { all: () => true, errors: isError, generated: (entry) => entry.rows > 0 };

/** Errors by status and reason, most frequent first: {status, reason, count, at}. */
function grouped(entries) {
  const groups = new Map();
  for (const entry of entries.filter(isError)) {
    const reason = reasonOf(entry);
    const key = `${entry.status} ${reason}`;
    const known = groups.get(key) ?? { status: entry.status, reason, count: 0, at: entry.at };
    groups.set(key, { ...known, count: known.count + 1 });
  }
  return [...groups.values()].sort((one, other) => other.count - one.count);
}

function Errors({ entries }) {
  const groups = grouped(entries);
  if (!groups.length) return null;
  return html`<section class="figures-box wide" id="errors"><h2>${t("requests.errors")}</h2><table>
    <thead><tr>${["status", "reason", "count", "last"].map((name) => html`<th scope="col">${t(`requests.${name}`)}</th>`)}</tr></thead>
    <tbody>${groups.slice(0, SHOWN).map(({ status, reason, count, at }) => html`<tr><th scope="row">${status}</th><td>${reason}</td><td>${number(count)}</td><td>${clock(at)}</td></tr>`)}</tbody>
  </table></section>`;
}

function Row({ entry }) {
  return html`<tr class=${isError(entry) ? "bad" : ""}>
    <th scope="row">${clock(entry.at)}</th><td>${entry.client}</td><td>${entry.method} ${entry.route}</td><td>${entry.status}</td>
    <td>${reasonOf(entry)}</td><td>${entry.rows ? number(entry.rows) : ""}</td>
    <td>${entry.rows ? `${number(entry.prompt_tokens)} / ${number(entry.completion_tokens)}` : ""}</td>
    <td>${entry.ttft_s == null ? "" : number(entry.ttft_s, 2)}</td><td>${number(entry.total_s, 2)}</td></tr>`;
}

/** Shown to administrators. Loads the list every two seconds while `visible`. */
export function Requests({ visible }) {
  const [{ requests: entries, logged }, setAnswer] = useState({ requests: [], logged: true });
  const [kind, setKind] = useState(KINDS[0]);
  const [wanted, setWanted] = useState("");
  const [more, setMore] = useState(1);
  usePolling(() => json("/v1/requests", { quiet: true }).then(setAnswer, () => {}), INTERVAL_MS, visible);
  if (!logged) return html`<p id="requests">${t("requests.off")}</p>`;
  if (!entries.length) return null;
  const text = wanted.trim().toLowerCase();
  const fits = (entry) => [entry.client, entry.method, entry.route, entry.status, entry.outcome, reasonOf(entry), entry.request_id].join(" ").toLowerCase().includes(text);
  const found = entries.filter((entry) => IS_KIND[kind](entry) && fits(entry));
  const columns = ["last", "client", "route", "status", "reason", "rows", "tokens", "ttft", "total"];
  return html`<${Errors} entries=${entries} />
  <section class="figures-box wide" id="requests"><h2>${t("requests.title")}</h2>
    <p class="row">${choice("requests-kind", t("batch.show"), kind, setKind, KINDS, (one) => t(`requests.${one}`))}
      <input type="search" id="requests-search" aria-label=${t("requests.search")} placeholder=${t("requests.search")} value=${wanted} onInput=${(event) => setWanted(event.currentTarget.value)} />
      <span class="quiet">${number(found.length)} / ${number(entries.length)}</span></p>
    <div class="scroll" tabindex="0" role="region" aria-label=${t("requests.title")}><table>
      <thead><tr>${columns.map((name) => html`<th scope="col">${t(`requests.${name}`)}</th>`)}</tr></thead>
      <tbody>${found.slice(0, more * SHOWN).map((entry) => html`<${Row} key=${`${entry.at} ${entry.request_id}`} entry=${entry} />`)}</tbody>
    </table></div>
    ${found.length > more * SHOWN && html`<button onClick=${() => setMore(more + 1)}>${t("more")}</button>`}
  </section>`;
}
