// Turns Markdown of a model into safe HTML: parsed by marked, sanitized by DOMPurify.

import "./vendor/dompurify.js";
import { marked } from "./vendor/marked.js";

const { DOMPurify } = globalThis;
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

// HTML in an answer is shown as text.
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
  if (node.tagName === "PRE") node.setAttribute("tabindex", "0"); // it scrolls, so the keyboard must reach it
});

/** Convert Markdown to sanitized HTML for `innerHTML`. */
export const markdown = (text) => DOMPurify.sanitize(marked.parse(text), CLEAN);

const FENCE = /^ {0,3}(```|~~~)/;

/**
 * Position where a growing text can be split: the last blank line outside of a code block.
 * Text before it does not change any more and is parsed only once.
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
    // an indented line may belong to a list item above it
    else if (!fenced && !line.trim() && /^\S/.test(text.slice(newline + 1, newline + 2))) end = newline + 1;
    at = newline + 1;
  }
}
