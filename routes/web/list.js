// A list whose rows exist only while they are in view. Rows may have any height.

import { html, oncePerFrame, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";

const MARGIN_PX = 400;

/**
 * `count` rows; `row(index)` -> content; `estimate`: height in pixels of a row that was not yet shown.
 * `current`: index of the row that stays in view, or -1.
 */
export function VirtualList({ count, row, estimate, current, id, label, onKeyDown }) {
  const place = useRef();
  const heights = useMemo(() => [], [count]);
  const [, redraw] = useState(0);
  const again = useMemo(() => oncePerFrame(() => redraw((times) => times + 1)), []);
  const heightOf = (index) => heights[index] ?? estimate;
  const { scrollTop = 0, clientHeight = 600 } = place.current ?? {};
  let from = 0;
  let above = 0;
  while (from < count && above + heightOf(from) < scrollTop - MARGIN_PX) above += heightOf(from++);
  let to = from;
  let height = 0;
  while (to < count && above + height < scrollTop + clientHeight + MARGIN_PX) height += heightOf(to++);
  let below = 0;
  for (let index = to; index < count; index++) below += heightOf(index);
  useEffect(() => {
    const watch = new ResizeObserver(() => {
      heights.length = 0;
      again();
    });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [heights]);
  useLayoutEffect(() => {
    let moved = false;
    for (const element of place.current.querySelectorAll("[data-row]")) {
      const index = Number(element.dataset.row);
      if (Math.abs(heightOf(index) - element.offsetHeight) > 1) moved = true;
      heights[index] = element.offsetHeight;
    }
    if (moved) again();
  });
  useLayoutEffect(() => {
    if (current < 0) return;
    let top = 0;
    for (let index = 0; index < current; index++) top += heightOf(index);
    const box = place.current;
    if (top < box.scrollTop || top + heightOf(current) > box.scrollTop + box.clientHeight) box.scrollTop = Math.max(0, top - box.clientHeight / 3);
  }, [current]);
  const rows = [];
  for (let index = from; index < to; index++) {
    rows.push(html`<div key=${index} data-row=${index} role="listitem" aria-setsize=${count} aria-posinset=${index + 1}>${row(index)}</div>`);
  }
  return html`<div class="virtual" id=${id} ref=${place} role="list" tabindex="0" aria-label=${label} onScroll=${again} onKeyDown=${onKeyDown}>
    <div role="presentation" style=${{ height: `${above}px` }}></div>${rows}<div role="presentation" style=${{ height: `${below}px` }}></div></div>`;
}
