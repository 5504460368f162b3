// Markdown of a model's answer as HTML that cannot do anything: parsed by marked, cleaned by DOMPurify.

import "./vendor/dompurify.js";
import { marked } from "./vendor/marked.js";

const { DOMPurify } = globalThis;
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

// HTML in an answer is shown as the text that it is.
marked.use({ gfm: true, breaks: true, renderer: { html: ({ text }) => text.replace(/[&<>"]/g, (letter) => ESCAPES[letter]) } });
const CLEAN = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong",
    "del", "sub", "sup", "a", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_TRUSTED_TYPE: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "PRE") node.setAttribute("tabindex", "0"); // it scrolls: the keyboard has to reach it
});

/** Clean HTML of Markdown text, as `innerHTML` takes it. */
export const markdown = (text) => DOMPurify.sanitize(marked.parse(text), CLEAN);

const FENCE = /^ {0,3}(```|~~~)/;

/**
 * Where a text that still grows can be parted: what stands before the last blank line outside of a code block
 * does not change any more, so it need not be read again with each piece that comes.
 */
export function settledEnd(text, from = 0) {
  let end = from;
  let at = from;
  let fenced = false;
  for (;;) {
    const newline = text.indexOf("\n", at);
    if (newline < 0) return end;
    const line = text.slice(at, newline);
    if (FENCE.test(line)) fenced = !fenced;
    // An indented line may belong to a list item above it.
    else if (!fenced && !line.trim() && /^\S/.test(text.slice(newline + 1, newline + 2))) end = newline + 1;
    at = newline + 1;
  }
}
