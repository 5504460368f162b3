// The list of background runs: open one, cancel one.

import { locale, number, t } from "../i18n.js";
import { html, usePolling, useState } from "../ui.js";
import { cancelBatch, isEnded, listBatches } from "./background.js";

const POLL_MS = 3000;

/** `open`: the visible run's batch. `reopen(batch)` shows another one. */
export function Runs({ visible, open, reopen }) {
  const [batches, setBatches] = useState([]);
  const load = () => listBatches().then(setBatches, () => {});
  usePolling(load, POLL_MS, visible, open?.id);
  if (!batches.length) return null;
  const cancel = (batch) => cancelBatch(batch.id).then(load, load);
  const when = (batch) => new Date(batch.created_at * 1000).toLocaleString(locale(), { dateStyle: "short", timeStyle: "medium" });
  return html`<details id="batch-runs"><summary>${t("batch.runs", { count: number(batches.length) })}</summary>
    <ul class="plainlist">${batches.map((batch) => {
      const { completed, failed, total } = batch.request_counts;
      const name = when(batch);
      return html`<li key=${batch.id} class="row"><b>${name}</b>
        <small>${t(`run.${batch.status}`)} · ${number(completed + failed)} / ${number(total || Number(batch.metadata.rows))} · ${batch.endpoint}</small><span class="space"></span>
        <button onClick=${() => reopen(batch)} disabled=${batch.id === open?.id} aria-label="${t("batch.open")} ${name}">${t("batch.open")}</button>
        ${!isEnded(batch) && html`<button onClick=${() => cancel(batch)} aria-label="${t("cancel")} ${name}">${t("cancel")}</button>`}
      </li>`;
    })}</ul></details>`;
}
