// A grid of hundreds of streamed texts. Plain DOM, created once; each frame updates the changed rows.

import { t } from "../i18n.js";

const SHOWN_CHARACTERS = 500;

function makeCard(row, choose) {
  const card = document.createElement("button");
  card.className = "card";
  card.type = "button";
  card.dataset.state = "running";
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

/** Create a grid in `place`. A click on a row calls `choose(row)`. */
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
    /** Replace the rows by empty ones. */
    reset(rows) {
      dirty.clear();
      cards = rows.map((row) => makeCard(row, choose));
      place.replaceChildren(...cards.map((one) => one.card));
    },
    /** Mark a row as changed. The next frame renders it. */
    changed(row) {
      dirty.add(row);
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(draw);
    },
  };
}
