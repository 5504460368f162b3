// Renders the Markdown of a growing answer. Complete blocks are parsed once, the rest once per frame.

import { markdown, settledEnd } from "../markdown.js";
import { html, useLayoutEffect, useRef } from "../ui.js";

/** Longest text without a blank line. Longer text is split here, to bound the work per frame. */
const LONGEST_END = 20_000;

/** Update `box`. Positions count from the answer's start, including its `dropped` characters. */
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

/** Sanitized Markdown. `dropped`: number of characters removed at the text's start. */
export function Answer({ text, dropped }) {
  const box = useRef();
  const drawn = useRef({ blocks: [], end: 0, tail: null });
  useLayoutEffect(() => draw(box.current, drawn.current, text, dropped), [text, dropped]);
  return html`<div class="markdown" ref=${box}></div>`;
}
