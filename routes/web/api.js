// The service's HTTP interface: one way to ask, one way to read a stream. Nothing here can do what curl cannot.

import { createStore } from "./ui.js";

const BASE = new URL(".", document.baseURI);
const PASSWORD = "rwkv.password";

/** Whether a password is asked for, and why: null, or {message, resolve}. */
export const passwordWanted = createStore(null);

/** A failure in the words of the service; `status` 0 means that no answer came. */
export class ApiError extends Error {
  constructor(message, status = 0, body = {}) {
    super(message);
    this.status = status;
    this.field = body.field;
    this.retryAfter = body.retryAfter;
  }
}

/** The password of this tab, kept until the tab is closed; never in a URL. */
export const password = {
  get: () => sessionStorage.getItem(PASSWORD) || "",
  set: (value) => sessionStorage.setItem(PASSWORD, value),
  forget: () => sessionStorage.removeItem(PASSWORD),
};

/** An address of the service, also where a proxy serves it below a path. */
export const address = (path) => new URL(path.replace(/^\//, ""), BASE);

let asking = null;
/** Ask for the password; requests that wait at the same time share the question. */
function askPassword(message) {
  asking ??= new Promise((resolve) => passwordWanted.set({ message, resolve })).finally(() => {
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

/** A password beyond printable ASCII is sent percent-encoded. */
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

/** The response to a request; asks for the password where one is wanted. Throws ApiError. */
export async function request(path, options = {}) {
  for (;;) {
    const tried = password.get();
    const response = await send(path, options);
    if (response.ok) return response;
    const error = await failure(response);
    if (error.status !== 401 || options.quiet) throw error;
    // Another request may have been told the password meanwhile.
    if (tried === password.get()) password.set(await askPassword(tried ? error.message : ""));
  }
}

const posted = (body, signal) => ({ method: "POST", body: JSON.stringify(body), type: "application/json", signal });

/** The JSON answer of a POST. Throws ApiError, also for a failure under status 200. */
export async function post(path, body, signal) {
  const answer = await (await request(path, posted(body, signal))).json();
  if (answer.error && !answer.choices) throw new ApiError(answer.error, 200, answer);
  return answer;
}

/** The events of a streamed POST, as they come. Throws ApiError; one row's failure is an event with `index`. */
export async function* stream(path, body, signal) {
  const response = await request(path, posted({ ...body, stream: true }, signal));
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error && event.index === undefined) throw new ApiError(event.error, 200, event);
    yield event;
  }
  throw new ApiError("", 0); // a stream without its end
}

/** The data of server-sent events in a stream of bytes. */
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
