// EPUB: translates the blocks of every chapter. Markup inside a block (bold, links) is lost.

import { parseXml } from "./xml.js";
import { readZip, writeZip } from "./zip.js";

const TYPE = "application/epub+zip";
const BLOCKS = "p, h1, h2, h3, h4, h5, h6, li, td, th, dt, dd, figcaption, caption, blockquote, div";
const KEPT_INSIDE = `${BLOCKS}, img, svg, image, video, audio, math, table, pre`;

const blocksOf = (page) =>
  [...page.querySelectorAll(BLOCKS)].filter((one) => one.textContent.trim() && !one.querySelector(KEPT_INSIDE) && !one.closest("pre"));

/** {texts, assemble(translations) -> Blob, preview(translations) -> string}. Throws Error. */
export async function epub(bytes) {
  const files = await readZip(bytes);
  if (new TextDecoder().decode(files.get("mimetype") ?? new Uint8Array()).trim() !== TYPE) throw new Error("not an EPUB");
  const pages = new Map();
  for (const [name, content] of files) {
    if (/\.x?html?$/i.test(name)) pages.set(name, parseXml(new TextDecoder().decode(content).replaceAll("&nbsp;", "&#160;"), name));
  }
  const blocks = [...pages.values()].flatMap(blocksOf);
  return {
    texts: blocks.map((one) => one.textContent.trim().replace(/\s+/g, " ")),
    preview: (translations) => translations.join("\n\n"),
    assemble(translations) {
      for (const [at, block] of blocks.entries()) block.textContent = translations[at];
      const written = new Map(files);
      for (const [name, page] of pages) {
        written.set(name, new TextEncoder().encode(`<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(page)}`));
      }
      return writeZip(written, TYPE);
    },
  };
}
