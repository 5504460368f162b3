// A plot of series over the last hour.

import "../vendor/uplot.js";
import { number } from "../i18n.js";
import { html, useLayoutEffect, useRef, useStore } from "../ui.js";
import { series } from "./series.js";

// uPlot is a classic script, so its file has an added line that exports it.
const { uPlot } = globalThis;
const COLORS = ["#2f7de1", "#e08a1e", "#2a9d5c"];
const HEIGHT = 160;
const LEAST_SPAN_S = 60;

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function makePlot(place, names, labels, digits) {
  const axis = { stroke: () => ink("--quiet"), grid: { stroke: () => ink("--line"), width: 1 }, ticks: { show: false } };
  return new uPlot(
    {
      width: Math.max(place.clientWidth, 200),
      height: HEIGHT,
      padding: [8, 28, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: true, range: (_, low, high) => [Math.min(low ?? 0, (high ?? 1) - LEAST_SPAN_S), high ?? 1] }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.1] } },
      axes: [{ ...axis, size: 28, space: 90, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => number(tick, tick % 1 ? 1 : 0)) }],
      series: [{}, ...names.map((name, at) => ({ label: labels[at], stroke: COLORS[at], width: 2, points: { show: false }, spanGaps: false }))],
    },
    [[], ...names.map(() => [])],
    place,
  );
}

/** `names`: series; `labels`: their labels; `unit`: unit of the last values. Nothing is shown without a value. */
export function Plot(props) {
  const { values } = useStore(series);
  return props.names.some((name) => values[name]?.some((value) => value !== null)) ? html`<${Shown} ...${props} />` : null;
}

function Shown({ title, names, labels, unit, digits = 0, visible }) {
  const place = useRef();
  const plot = useRef();
  const { times, values } = useStore(series);
  useLayoutEffect(() => {
    plot.current = makePlot(place.current, names, labels, digits);
    const watch = new ResizeObserver(() => place.current.clientWidth && plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      plot.current.destroy();
    };
  }, []);
  useLayoutEffect(() => {
    if (visible && plot.current) plot.current.setData([times, ...names.map((name) => values[name] ?? times.map(() => null))]);
  }, [times, visible]);
  const last = (name) => (values[name] ?? []).findLast((value) => value !== null) ?? NaN;
  return html`<figure class="plot">
    <figcaption><b>${title}</b>
      ${names.map((name, at) => html`<span class="key"><span class="swatch s${at}" aria-hidden="true"></span>${labels[at]} <b data-series=${name}>${number(last(name), digits)}</b> ${unit}</span>`)}
    </figcaption>
    <div ref=${place} aria-hidden="true"></div>
  </figure>`;
}
