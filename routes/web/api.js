// Client of the service's HTTP API.

import { createStore } from "./ui.js";

const BASE = new URL(".", document.baseURI);
const PASSWORD = "rwkv.password";

/** The open password dialog: {message, resolve}, or null. */
export const passwordWanted = createStore(null);

/** An error with the service's message. `status` 0: no answer. */
export class ApiError extends Error {
  constructor(message, status = 0, body = {}) {
    super(message);
    this.status = status;
    this.field = body.field;
    this.retryAfter = body.retryAfter;
  }
}

/** The password, kept until the tab is closed. It is never in a URL. */
export const password = {
  get: () => sessionStorage.getItem(PASSWORD) || "",
  set: (value) => sessionStorage.setItem(PASSWORD, value),
  forget: () => sessionStorage.removeItem(PASSWORD),
};

/** URL of a path of the service. Works below a proxy's path too. */
export const address = (path) => new URL(path.replace(/^\//, ""), BASE);

let asking = null;
/** Open the password dialog and keep what is typed. Concurrent requests share it. */
function askPassword(message) {
  asking ??= new Promise((resolve) => passwordWanted.set({ message, resolve })).then((typed) => {
    password.set(typed);
    asking = null;
    passwordWanted.set(null);
  });
  return asking;
}

async function send(path, { method = "GET", body, type, signal } = {}) {
  const headers = {};
  if (password.get()) headers.Authorization = `Bearer ${asHeader(password.get())}`;
  if (type) headers["Content-Type"] = type;
  try {
    return await fetch(address(path), { method, headers, body, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("", 0);
  }
}

/** Percent-encodes passwords that are not printable ASCII. */
const asHeader = (text) => (/^[\x20-\x7e]*$/.test(text) ? text : encodeURIComponent(text));

async function failure(response) {
  const text = await response.text();
  let body = {};
  try {
    body = JSON.parse(text);
  } catch {
    body = { error: text.slice(0, 300) || `HTTP ${response.status}` };
  }
  const message = typeof body.error === "object" ? body.error.message : body.error;
  return new ApiError(message, response.status, { ...body, retryAfter: Number(response.headers.get("Retry-After")) });
}

/** Send a request; opens the password dialog if needed. Throws ApiError. */
export async function request(path, options = {}) {
  for (;;) {
    const tried = password.get();
    const response = await send(path, options);
    if (response.ok) return response;
    const error = await failure(response);
    if (error.status !== 401 || options.quiet) throw error;
    // another request may have got the password in the meantime
    if (tried === password.get()) await askPassword(tried ? error.message : "");
  }
}

const posted = (body, signal) => ({ method: "POST", body: JSON.stringify(body), type: "application/json", signal });

/** Send a request and return its JSON answer. Throws ApiError. */
export const json = async (path, options) => (await request(path, options)).json();

/** Send a POST and return its JSON answer. Throws ApiError. */
export const post = (path, body, signal) => json(path, posted(body, signal));

/** Send a form and return its JSON answer. Throws ApiError. */
export function postForm(path, fields, signal) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) body.set(name, value);
  return json(path, { method: "POST", body, signal });
}

/** Yield the events of a streamed POST. Throws ApiError. An error of one row is an event with `index`. */
export async function* stream(path, body, signal) {
  const response = await request(path, posted({ ...body, stream: true }, signal));
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error && event.index === undefined) throw new ApiError(event.error, 200, event);
    yield event;
  }
  throw new ApiError("", 0); // the stream ended without [DONE]
}

/** Yield the data of server-sent events. */
async function* readEvents(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("", 0);
      });
      if (done) return;
      const parts = (waiting + value).split("\n\n");
      waiting = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
