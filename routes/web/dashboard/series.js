// Time series of the last hour: one point per sample of /metrics.

import { INTERVAL_MS, service } from "../monitor.js";
import { createStore } from "../ui.js";
import { buckets, quantile, total } from "./prometheus.js";

const KEPT = (60 * 60 * 1000) / INTERVAL_MS;
const STORED = "rwkv.series";
const SHARES = { p50: 0.5, p95: 0.95 };
/** Window of the percentiles in seconds. */
const WINDOW_S = 30;

/** Counters shown as rates, by the name of their series. */
const RATES = {
  generated: "rwkv_completion_tokens_total",
  read: "rwkv_computed_tokens",
};
const GAUGES = { running: "rwkv_running_rows", waiting: "rwkv_waiting_rows" };
const HISTOGRAMS = { first: "rwkv_first_token_seconds", between: "rwkv_inter_token_seconds" };

/** Times (Unix seconds) and, by name, one value per time. null: no value. */
export const series = createStore(kept());

/** The series that this tab had before it was reloaded, without points that are too old. */
function kept() {
  try {
    const { times, values } = JSON.parse(sessionStorage.getItem(STORED));
    const from = times.findIndex((time) => time > Date.now() / 1000 - (KEPT * INTERVAL_MS) / 1000);
    if (from < 0) return { times: [], values: {} };
    return { times: times.slice(from), values: Object.fromEntries(Object.entries(values).map(([name, list]) => [name, list.slice(from)])) };
  } catch {
    return { times: [], values: {} };
  }
}

addEventListener("pagehide", () => {
  try {
    sessionStorage.setItem(STORED, JSON.stringify(series.get()));
  } catch {
    // without storage, the series begin again
  }
});

function ratesOf(before, now) {
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const rate = (name) => {
    const [old, fresh] = [before && total(before.metrics, name), total(now.metrics, name)];
    // a smaller counter belongs to a restarted engine
    return seconds > 0 && fresh >= old ? (fresh - old) / seconds : null;
  };
  return Object.fromEntries(Object.entries(RATES).map(([key, name]) => [key, rate(name)]));
}

function percentiles(looks, now) {
  const past = looks.findLast((look) => now.at - look.at >= WINDOW_S * 1000) ?? looks[0];
  const found = {};
  for (const [key, name] of Object.entries(HISTOGRAMS)) {
    const before = past ? buckets(past.metrics, name) : [];
    for (const [share, part] of Object.entries(SHARES)) {
      const seconds = quantile(before, buckets(now.metrics, name), part);
      found[`${key}_${share}`] = seconds === null ? null : seconds * 1000;
    }
  }
  return found;
}

/** One point of every series. */
function pointOf(looks, now) {
  const gauges = Object.fromEntries(Object.entries(GAUGES).map(([key, name]) => [key, total(now.metrics, name) ?? null]));
  return { ...ratesOf(looks.at(-1), now), ...gauges, ...percentiles(looks, now) };
}

function append({ times, values }, at, point) {
  const length = times.length;
  const next = {};
  for (const name of new Set([...Object.keys(values), ...Object.keys(point)])) {
    const known = values[name] ?? new Array(length).fill(null);
    next[name] = [...known, point[name] ?? null].slice(-KEPT);
  }
  return { times: [...times, at / 1000].slice(-KEPT), values: next };
}

/** Start to record samples. */
export function keepSamples() {
  let looks = [];
  let last = 0;
  service.subscribe((now) => {
    if (now.state !== "ready" || now.at === last) return;
    last = now.at;
    if (looks.length && total(now.metrics, RATES.generated) < total(looks.at(-1).metrics, RATES.generated)) looks = [];
    const point = pointOf(looks, now);
    looks = [...looks, { at: now.at, metrics: now.metrics }].slice(-Math.ceil((WINDOW_S * 1000) / INTERVAL_MS) - 2);
    series.set((known) => append(known, now.at, point));
  });
}
