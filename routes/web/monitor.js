// Polls the service's status and metrics every two seconds and detects restarts of the engine.

import { request } from "./api.js";
import { parseMetrics } from "./dashboard/prometheus.js";
import { createStore } from "./ui.js";

export const INTERVAL_MS = 2000;
const PATIENCE_MS = 10_000;

/**
 * `state`: "starting", "ready" or "away". `reason`: the service's message, "" without an answer.
 * `status`: the last /status. `metrics`: the last /metrics. `at`: their time. `restarts`: restarts of the engine.
 */
export const service = createStore({ state: "starting", reason: "", status: null, metrics: null, at: 0, restarts: 0 });

async function look() {
  const ask = (path, options) => request(path, { ...options, signal: AbortSignal.timeout(PATIENCE_MS) });
  const [status, metrics] = await Promise.all([
    ask("/status").then((response) => response.json()),
    ask("/metrics", { quiet: true }).then(
      (response) => response.text(),
      (error) => (error.status === 401 ? "" : Promise.reject(error)), // only administrators get it
    ),
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

/** Poll now and then every INTERVAL_MS. */
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
