// The loss of a tuning, per step, as a drawing.

import { number, t } from "../i18n.js";
import { html, useLayoutEffect, useRef, useState } from "../ui.js";

const SIZE = { height: 180, left: 44, bottom: 20 };

/** Points [step, loss] by series, from the events of a job. */
export function lossesOf(events) {
  const data = events.filter((event) => event.type === "metrics").map((event) => event.data);
  const of = (name) => data.filter((one) => Number.isFinite(one[name]) && one.step !== undefined).map((one) => [one.step, one[name]]);
  return { train: of("train_loss"), valid: of("valid_loss") };
}

/** Nothing is shown without two points. */
export const LossCurve = ({ losses }) => losses.train.length + losses.valid.length > 1 && html`<${Drawing} losses=${losses} />`;

/** One unit of the drawing is one pixel, so that its numbers are as large as other text. */
function Drawing({ losses }) {
  const svg = useRef();
  const [width, setWidth] = useState(600);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([{ contentRect }]) => contentRect.width && setWidth(contentRect.width));
    watch.observe(svg.current);
    return () => watch.disconnect();
  }, []);
  const all = [...losses.train, ...losses.valid];
  const last = Math.max(...all.map(([step]) => step), 1);
  const highest = Math.max(...all.map(([, loss]) => loss), 1e-6);
  const x = (step) => SIZE.left + ((width - SIZE.left - 8) * step) / last;
  const y = (loss) => (SIZE.height - SIZE.bottom) * (1 - (0.95 * loss) / highest);
  const line = (points) => points.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const text = (points) => (points.length ? number(points.at(-1)[1], 3) : "–");
  const base = SIZE.height - SIZE.bottom;
  return html`<figure class="plot"><figcaption><b>${t("tune.loss")}</b>
      ${["train", "valid"].map((name, at) => html`<span class="key"><span class="swatch s${at}" aria-hidden="true"></span>${t(`tune.${name}`)} <b>${text(losses[name])}</b></span>`)}</figcaption>
    <svg id="tune-curve" ref=${svg} viewBox="0 0 ${width} ${SIZE.height}" role="img" aria-label=${`${t("tune.train")} ${text(losses.train)}, ${t("tune.valid")} ${text(losses.valid)}`}>
      <line class="axis" x1=${SIZE.left} x2=${width} y1=${base} y2=${base} /><line class="axis" x1=${SIZE.left} x2=${SIZE.left} y1="0" y2=${base} />
      <text x=${SIZE.left - 6} y=${base} text-anchor="end">0</text><text x=${SIZE.left - 6} y=${y(highest) + 4} text-anchor="end">${number(highest, 2)}</text>
      <text x=${width - 8} y=${SIZE.height - 4} text-anchor="end">${number(last)}</text>
      ${["train", "valid"].map((name, at) => html`<polyline class="curve c${at}" points=${line(losses[name])} />${losses[name].length === 1 && html`<circle class="curve c${at}" r="3" cx=${x(losses[name][0][0])} cy=${y(losses[name][0][1])} />`}`)}
    </svg></figure>`;
}
