// Polls the service's status and metrics every two seconds and detects restarts of the engine.

import { request } from "./api.js";
import { parseMetrics } from "./dashboard/prometheus.js";
import { createStore } from "./ui.js";

export const INTERVAL_MS = 2000;
const TIMEOUT_MS = 10_000;

/**
 * `state`: "starting", "ready" or "unreachable". `reason`: the service's message, "" without an answer.
 * `status`: the last /status. `metrics`: the last /metrics. `at`: when they arrived. `restarts`: restarts of the engine.
 */
export const service = createStore({ state: "starting", reason: "", status: null, metrics: null, at: 0, restarts: 0 });

/** Where the states of the first tier are: "vram" with a GPU, else "memory". */
export const firstTier = ({ status }) => (status?.devices?.some((name) => name.startsWith("cuda")) ? "vram" : "memory");

/** Whether the small model of the repository answers. */
export const isDemo = ({ status }) => Boolean(status?.model_file?.startsWith("rwkv7-demo"));

async function poll() {
  const get = (path, options) => request(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  const [status, metrics] = await Promise.all([
    get("/status").then((response) => response.json()),
    get("/metrics", { quiet: true }).then(
      (response) => response.text(),
      (error) => (error.status === 401 ? "" : Promise.reject(error)), // only administrators get it
    ),
  ]);
  service.set((previous) => {
    const oldPid = previous.status?.processes?.engine?.pid;
    const restarted = oldPid && oldPid !== status.processes?.engine?.pid;
    return {
      state: "ready",
      reason: "",
      status,
      metrics: parseMetrics(metrics),
      at: Date.now(),
      restarts: previous.restarts + (restarted ? 1 : 0),
    };
  });
}

/** Longest time until a lost service is noticed: after a broken connection, and after an error that it sent. */
const LOST_MS = { broken: TIMEOUT_MS + 2 * INTERVAL_MS, sent: 2 * INTERVAL_MS };
const MAX_AWAY_MS = 600_000;

/**
 * Wait until a service that was lost answers again. false: the error has another cause, or it stays away.
 * Throws AbortError after `signal`.
 */
export async function recovered(error, signal) {
  if (![0, 200, 502, 503].includes(error.status)) return false;
  const { restarts } = service.get();
  const started = Date.now();
  let wasAway = false;
  for (;;) {
    const now = service.get();
    wasAway ||= now.state === "unreachable" || now.restarts > restarts;
    if (wasAway && now.state === "ready") return true;
    if (Date.now() - started > (wasAway ? MAX_AWAY_MS : LOST_MS[error.status ? "sent" : "broken"])) return false;
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS / 10));
    signal.throwIfAborted();
  }
}

/** Poll at once, then every INTERVAL_MS. */
export async function startPolling() {
  for (;;) {
    const started = Date.now();
    try {
      await poll();
    } catch (error) {
      service.set((previous) => ({ ...previous, state: "unreachable", reason: error.status ? error.message : "" }));
    }
    await new Promise((resolve) => setTimeout(resolve, Math.max(200, INTERVAL_MS - (Date.now() - started))));
  }
}
