// A grid of streamed texts. Plain DOM: only the cards in view exist, and each frame updates the changed ones.

import { t } from "../i18n.js";
import { oncePerFrame } from "../ui.js";

const SHOWN_CHARACTERS = 500;
const CARD_PX = { width: 208, height: 128, gap: 6 };
/** Rows of cards above and below the visible ones. */
const MARGIN_ROWS = 2;
const ARRANGE_MS = 500;

const stateOf = (row) => row.reason ?? "running";
const ORDERS = {
  input: (one, other) => one.index - other.index,
  state: (one, other) => stateOf(one).localeCompare(stateOf(other)) || one.index - other.index,
  longest: (one, other) => other.output.length - one.output.length || one.index - other.index,
  shortest: (one, other) => one.output.length - other.output.length || one.index - other.index,
};
export const SORTS = Object.keys(ORDERS);

function makeCard(row, choose) {
  const card = document.createElement("button");
  card.className = "card";
  card.type = "button";
  const head = document.createElement("span");
  head.className = "card-head";
  head.textContent = `${row.index + 1} · ${Object.values(row.values).join(" · ").slice(0, 80)}`;
  const text = document.createTextNode("");
  const body = document.createElement("span");
  body.className = "card-body";
  const inner = document.createElement("span");
  inner.append(text);
  body.append(inner);
  card.append(head, body);
  card.addEventListener("click", () => choose(row));
  return { card, text };
}

function update({ card, text }, row) {
  const now = row.error ? (row.error === "offline" ? t("notice.offline") : row.error) : row.output.slice(-SHOWN_CHARACTERS);
  if (text.data !== now) text.data = now;
  card.dataset.state = stateOf(row);
}

/** Create a grid in `place`, which scrolls. A click on a row calls `choose(row)`. */
export function createGrid(place, choose) {
  const inner = document.createElement("div");
  inner.className = "cards";
  place.append(inner);
  let rows = [];
  let order = [];
  let wanted = { filter: "all", sort: SORTS[0] };
  let arranged = 0;
  const shown = new Map();
  const dirty = new Set();

  function arrange() {
    arranged = performance.now();
    order = rows.filter((row) => wanted.filter === "all" || stateOf(row) === wanted.filter).sort(ORDERS[wanted.sort]);
    place.dataset.rows = order.length;
  }

  /** Place the cards in view, and remove others. */
  function layOut() {
    const columns = Math.max(1, Math.floor((place.clientWidth + CARD_PX.gap) / (CARD_PX.width + CARD_PX.gap)));
    const width = (place.clientWidth - CARD_PX.gap * (columns - 1)) / columns;
    const line = CARD_PX.height + CARD_PX.gap;
    const from = Math.max(0, Math.floor(place.scrollTop / line) - MARGIN_ROWS) * columns;
    const to = (Math.ceil((place.scrollTop + place.clientHeight) / line) + MARGIN_ROWS) * columns;
    inner.style.height = `${Math.ceil(order.length / columns) * line}px`;
    const inView = new Set(order.slice(from, to));
    for (const [row, { card }] of shown) {
      if (inView.has(row) || card === document.activeElement) continue;
      card.remove();
      shown.delete(row);
    }
    let next = null;
    for (let at = Math.min(to, order.length) - 1; at >= from; at--) {
      const row = order[at];
      if (!shown.has(row)) shown.set(row, makeCard(row, choose));
      const { card } = shown.get(row);
      update(shown.get(row), row);
      card.style.transform = `translate(${(at % columns) * (width + CARD_PX.gap)}px, ${Math.floor(at / columns) * line}px)`;
      card.style.width = `${width}px`;
      if (card.parentNode !== inner || card.nextSibling !== next) inner.insertBefore(card, next); // tab order
      next = card;
    }
  }

  const draw = oncePerFrame(() => {
    const moves = wanted.filter !== "all" || wanted.sort !== SORTS[0];
    if (moves && performance.now() - arranged > ARRANGE_MS) {
      arrange();
      layOut();
    }
    for (const row of dirty) if (shown.has(row)) update(shown.get(row), row);
    dirty.clear();
  });
  const layOutSoon = oncePerFrame(layOut);
  place.addEventListener("scroll", layOutSoon, { passive: true });
  new ResizeObserver(layOutSoon).observe(place);

  return {
    /** Show other rows. */
    reset(next) {
      dirty.clear();
      rows = next;
      for (const { card } of shown.values()) card.remove();
      shown.clear();
      arrange();
      layOut();
    },
    /** Show rows of one state ("all": every row), in this order. */
    arrange(filter, sort) {
      wanted = { filter, sort };
      arrange();
      layOut();
    },
    /** Mark a row as changed. The next frame renders it. */
    changed(row) {
      dirty.add(row);
      draw();
    },
    /** Arrange again after the last change. */
    settled() {
      arrange();
      layOutSoon();
    },
  };
}
