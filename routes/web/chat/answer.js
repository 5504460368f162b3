// Renders the Markdown of a growing answer. Complete blocks are parsed once, the rest once per frame.

import { markdown, settledEnd } from "../markdown.js";
import { t } from "../i18n.js";
import { html, useLayoutEffect, useRef } from "../ui.js";

/** Longest text without a blank line. Longer text is split here, to bound the work per frame. */
const LONGEST_END = 20_000;

/** Set sanitized HTML, with a copy button per code block. */
function fill(element, text) {
  element.innerHTML = markdown(text);
  for (const block of element.querySelectorAll("pre")) {
    const button = document.createElement("button");
    button.className = "plain copy";
    button.type = "button";
    button.textContent = t("copy");
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(block.textContent).then(() => (button.textContent = t("copied")), () => {});
    });
    block.before(button);
  }
}

/** Update `box`. Positions count from the answer's start, including its `dropped` characters. */
function render(box, rendered, text, dropped) {
  if (rendered.end < dropped || rendered.end > dropped + text.length) {
    box.textContent = "";
    Object.assign(rendered, { blocks: [], end: dropped, tail: null });
  }
  while (rendered.blocks.length && rendered.blocks[0].end <= dropped) rendered.blocks.shift().element.remove();
  let end = dropped + settledEnd(text, rendered.end - dropped);
  if (dropped + text.length - end > LONGEST_END) end = dropped + text.length;
  if (!rendered.tail) rendered.tail = box.appendChild(document.createElement("div"));
  if (end > rendered.end) {
    const element = document.createElement("div");
    fill(element, text.slice(rendered.end - dropped, end - dropped));
    box.insertBefore(element, rendered.tail);
    rendered.blocks.push({ element, end });
    rendered.end = end;
  }
  fill(rendered.tail, text.slice(end - dropped));
}

/** Sanitized Markdown. `dropped`: number of characters removed at the text's start. */
export function Answer({ text, dropped }) {
  const box = useRef();
  const rendered = useRef({ blocks: [], end: 0, tail: null });
  useLayoutEffect(() => render(box.current, rendered.current, text, dropped), [text, dropped]);
  return html`<div class="markdown" ref=${box}></div>`;
}
