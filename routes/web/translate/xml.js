// XML as a document of its own, never a part of the page: which is what the page's policy lets this do.

const policy = globalThis.trustedTypes?.createPolicy("xml", { createHTML: (text) => text });

/** A document. Throws Error if `text` is not well-formed. */
export function parseXml(text, name = "it") {
  const page = new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, "text/xml");
  if (page.getElementsByTagName("parsererror").length) throw new Error(`${name} is not well-formed XML`);
  return page;
}
