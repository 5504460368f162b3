// Turns Markdown of a model into safe HTML: parsed by marked, sanitized by DOMPurify. LaTeX maths becomes MathML.

import { escaped, mathml } from "./math.js";
import "./vendor/dompurify.js";
import { marked } from "./vendor/marked.js";

const { DOMPurify } = globalThis;

/** Formulas: $$…$$ and \\[…\\] are displayed, \\(…\\) and $…$ are in the line. A price like $5 is no formula. */
const DISPLAYED = /^(?:\$\$([^$]+)\$\$|\\\[([^]+?)\\\])/;
const INLINE = /^(?:\\\(([^]+?)\\\)|\$(?![\s$])((?:\\[^]|[^\\$\n])*?[^\s\\$])\$(?!\d))/;

/** An extension of marked for formulas of one pattern. */
const formulas = (name, level, pattern, isDisplay, start) => ({
  name,
  level,
  start: (text) => text.match(start)?.index,
  tokenizer(text) {
    const found = pattern.exec(text);
    return found && { type: name, raw: found[0], formula: found[1] ?? found[2] };
  },
  renderer: ({ formula }) => mathml(formula, isDisplay),
});

// HTML in an answer is shown as text.
marked.use({
  gfm: true,
  breaks: true,
  renderer: { html: ({ text }) => escaped(text) },
  extensions: [
    formulas("formulaBlock", "block", new RegExp(`${DISPLAYED.source}[ \\t]*(?:\\n|$)`), true, /(?<=\n)(?:\$\$|\\\[)/),
    formulas("formulaDisplay", "inline", DISPLAYED, true, /\$\$|\\\[/),
    formulas("formula", "inline", INLINE, false, /\$|\\\(/),
  ],
});

/** Attributes that are no addresses. */
const PLAIN = [
  "title", "start", "align", "display", "displaystyle", "mathvariant", "stretchy", "fence", "minsize", "movablelimits", "accent",
  "accentunder", "linethickness", "width", "lspace", "notation", "columnalign",
];
const CLEAN = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong",
    "del", "sub", "sup", "a", "table", "thead", "tbody", "tr", "th", "td",
    "math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mstyle", "mpadded", "mphantom", "menclose", "mfrac", "msqrt", "mroot",
    "msub", "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd",
  ],
  ALLOWED_ATTR: ["href", ...PLAIN],
  ADD_URI_SAFE_ATTR: PLAIN,
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
