// Follows the service: its status and figures every two seconds, whether its engine is there, when it was restarted.

import { request } from "./api.js";
import { parseMetrics } from "./dashboard/prometheus.js";
import { createStore } from "./ui.js";

export const INTERVAL_MS = 2000;
const PATIENCE_MS = 10_000;

/**
 * `state`: "starting", "ready" or "away"; `reason`: in the service's words, "" if nothing answered;
 * `status`: the last /status; `metrics`: the last /metrics; `at`: their time; `restarts`: times the engine was replaced.
 */
export const service = createStore({ state: "starting", reason: "", status: null, metrics: null, at: 0, restarts: 0 });

async function look() {
  const ask = (path) => request(path, { signal: AbortSignal.timeout(PATIENCE_MS) });
  const [status, metrics] = await Promise.all([
    ask("/status").then((response) => response.json()),
    ask("/metrics").then((response) => response.text()),
  ]);
  service.set((known) => {
    const before = known.status?.processes?.engine?.pid;
    const restarted = before && before !== status.processes?.engine?.pid;
    return {
      state: "ready",
      reason: "",
      status,
      metrics: parseMetrics(metrics),
      at: Date.now(),
      restarts: known.restarts + (restarted ? 1 : 0),
    };
  });
}

/** Look at once, and from then on every INTERVAL_MS. */
export async function follow() {
  for (;;) {
    const started = Date.now();
    try {
      await look();
    } catch (error) {
      service.set((known) => ({ ...known, state: "away", reason: error.status ? error.message : "" }));
    }
    await new Promise((resolve) => setTimeout(resolve, Math.max(200, INTERVAL_MS - (Date.now() - started))));
  }
}
