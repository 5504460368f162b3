// Parses XML as a separate document. The page's policy allows it because the XML is never shown.

const policy = globalThis.trustedTypes?.createPolicy("xml", { createHTML: (text) => text });

/** Parse a document. Throws Error if `text` is not well-formed. */
export function parseXml(text, name = "it") {
  const page = new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, "text/xml");
  if (page.getElementsByTagName("parsererror").length) throw new Error(`${name} is not well-formed XML`);
  return page;
}
