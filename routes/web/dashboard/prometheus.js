// Parser of Prometheus' text format.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", "\\": "\\", '"': '"' };

/** Name -> [{labels, value}]. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, letter) => ESCAPES[letter] ?? letter);
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3].replace("Inf", "Infinity")) });
  }
  return found;
}

/** Sum of a metric over all labels, or over those that match `wanted`. undefined if there is none. */
export function total(metrics, name, wanted = {}) {
  const samples = (metrics.get(name) || []).filter((one) =>
    Object.entries(wanted).every(([label, value]) => one.labels[label] === value),
  );
  return samples.length ? samples.reduce((sum, one) => sum + one.value, 0) : undefined;
}

/** Buckets of a histogram, summed over its labels: ascending [[upper bound, cumulative count]]. */
export function buckets(metrics, name) {
  const sums = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) || []) {
    const bound = Number(labels.le.replace("Inf", "Infinity"));
    sums.set(bound, (sums.get(bound) || 0) + value);
  }
  return [...sums].sort((one, other) => one[0] - other[0]);
}

/** The `share` quantile of a histogram's values between two samples. null without values. */
export function quantile(before, after, share) {
  const counts = after.map(([bound, count], at) => [bound, count - (before[at]?.[1] ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!(all > 0)) return null;
  const wanted = share * all;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (wanted - below)) / Math.max(count - below, 1e-9);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}
