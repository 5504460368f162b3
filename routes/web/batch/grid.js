// Hundreds of growing texts on one screen: plain DOM, made once; each frame writes the rows that have changed.

import { t } from "../i18n.js";

const SHOWN_CHARACTERS = 500;

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

/** A grid in `place`. `choose(row)` is called when a row is clicked. */
export function createGrid(place, choose) {
  let cards = [];
  const dirty = new Set();
  let waiting = false;

  function draw() {
    waiting = false;
    for (const row of dirty) {
      const { card, text } = cards[row.index];
      text.data = row.error ? (row.error === "offline" ? t("notice.offline") : row.error) : row.output.slice(-SHOWN_CHARACTERS);
      card.dataset.state = row.reason ?? "running";
    }
    dirty.clear();
  }

  return {
    /** Show other rows, all empty. */
    reset(rows) {
      dirty.clear();
      cards = rows.map((row) => makeCard(row, choose));
      place.replaceChildren(...cards.map((one) => one.card));
    },
    /** A row has grown or ended; it is drawn with the next frame. */
    changed(row) {
      dirty.add(row);
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(draw);
    },
  };
}
