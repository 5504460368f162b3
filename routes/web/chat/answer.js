// An answer's Markdown while it grows: what is settled is parsed once, only the end again, once a frame.

import { markdown, settledEnd } from "../markdown.js";
import { html, useLayoutEffect, useRef } from "../ui.js";

/** An end without a blank line is parted here all the same, so that a frame's work is bounded. */
const LONGEST_END = 20_000;

/** Bring `box` up to date. Positions count from the answer's very beginning, of which `dropped` characters are gone. */
function draw(box, drawn, text, dropped) {
  if (drawn.end < dropped || drawn.end > dropped + text.length) {
    box.textContent = "";
    Object.assign(drawn, { blocks: [], end: dropped, tail: null });
  }
  while (drawn.blocks.length && drawn.blocks[0].end <= dropped) drawn.blocks.shift().element.remove();
  let end = dropped + settledEnd(text, drawn.end - dropped);
  if (dropped + text.length - end > LONGEST_END) end = dropped + text.length;
  if (!drawn.tail) drawn.tail = box.appendChild(document.createElement("div"));
  if (end > drawn.end) {
    const element = document.createElement("div");
    element.innerHTML = markdown(text.slice(drawn.end - dropped, end - dropped));
    box.insertBefore(element, drawn.tail);
    drawn.blocks.push({ element, end });
    drawn.end = end;
  }
  drawn.tail.innerHTML = markdown(text.slice(end - dropped));
}

/** Markdown, made safe. `dropped`: characters that the text has lost at its beginning. */
export function Answer({ text, dropped }) {
  const box = useRef();
  const drawn = useRef({ blocks: [], end: 0, tail: null });
  useLayoutEffect(() => draw(box.current, drawn.current, text, dropped), [text, dropped]);
  return html`<div class="markdown" ref=${box}></div>`;
}
