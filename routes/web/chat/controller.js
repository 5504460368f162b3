// Actions on conversations: send, stop, branch, resume, delete, export, import.

import { ApiError, post, request, stream } from "../api.js";
import { chosenModel, decodeFields } from "../decode.js";
import { t } from "../i18n.js";
import { recovered } from "../monitor.js";
import { createStorage } from "../storage.js";
import { createStore, download, oncePerFrame } from "../ui.js";
import {
  ROOT, addTurn, adoptDialogues, asJson, asMarkdown, childrenOf, fromText, grow, newConversation, newestBelow, parsedName,
  pathTo, turnOf,
} from "./conversation.js";
import { parted, promptOf, roundOf, stopsOf } from "./prompt.js";

/** Texts of conversations. The service stores states, no texts. */
const storage = createStorage("rwkv-conversations", "conversations");
const LISTED = 200;
/** Restarts of the service after which an answer continues. */
const MAX_RESUMES = 1;

/**
 * `conversations`: conversations with text in this browser, by id. `sessions`: the service's sessions, by id, with
 * their tier. `open`: the visible conversation. `problem`: the last error message. `done`: what an import added.
 */
export const chat = createStore({
  conversations: new Map(),
  sessions: new Map(),
  counts: null,
  listed: LISTED,
  open: newConversation(),
  problem: "",
  done: "",
});
const rerender = oncePerFrame(() => chat.set((known) => ({ ...known })));
const running = new Map();
const runKey = (conversation, turn) => `${conversation.id}/${turn.id}`;

export const isRunning = (conversation, turn) => running.has(runKey(conversation, turn));

const say = (problem, done = "") => chat.set((known) => ({ ...known, problem, done }));
const messageOf = (error) => error.message || "offline";

async function keep(conversation) {
  chat.get().conversations.set(conversation.id, conversation);
  rerender();
  // without storage (a private window) a conversation exists until the page is closed
  await storage.save(conversation).catch(() => {});
}

/** Load this browser's conversations and the service's sessions. */
export async function begin() {
  const kept = await storage.load().catch(() => []);
  for (const conversation of kept) chat.get().conversations.set(conversation.id, conversation);
  rerender();
  await refresh();
}

/** Load the service's sessions with their tiers. */
export async function refresh() {
  try {
    const found = await post("/state/status", { limit: chat.get().listed });
    const sessions = new Map();
    for (const one of found.sessions) {
      const { session, dialogue } = parsedName(one.session_id);
      const entry = sessions.get(session) ?? { id: session, dialogues: [], linear: false, tier: one.cache_level, updated: one.timestamp };
      if (dialogue === null) entry.linear = true;
      else entry.dialogues.push(dialogue);
      sessions.set(session, entry);
    }
    chat.set((known) => ({ ...known, sessions, counts: found }));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // a notice is shown if the service is unavailable
  }
}

export function listMore() {
  chat.set((known) => ({ ...known, listed: known.listed + LISTED }));
  return refresh();
}

export const startNew = () => chat.set((known) => ({ ...known, open: newConversation(), problem: "", done: "" }));

/** Open a conversation, or a session without text in this browser. */
export function open(id) {
  const { conversations, sessions } = chat.get();
  const session = sessions.get(id);
  const conversation = conversations.get(id) ?? newConversation({ id, linear: session?.linear, title: id });
  if (session && !conversation.linear) adoptDialogues(conversation, [...session.dialogues].sort((one, other) => one - other));
  if (session?.linear && !conversation.turns.length) {
    Object.assign(addTurn(conversation, ROOT, "", "off"), { reason: "stop", dialogue: 0, foreign: true });
  }
  chat.set((known) => ({ ...known, open: conversation, problem: "", done: "" }));
}

/** Show the newest branch below a turn. */
export function show(id) {
  const { open: conversation } = chat.get();
  conversation.current = newestBelow(conversation, id);
  rerender();
}

/** Walk the tree: "up" to the parent, "down" to the newest successor, "left" and "right" to other branches. */
export function walk(direction) {
  const { open: conversation } = chat.get();
  const turn = turnOf(conversation, conversation.current);
  const branches = turn ? childrenOf(conversation, turn.parent) : [];
  const at = branches.indexOf(turn);
  const next = {
    up: () => turn?.parent,
    down: () => childrenOf(conversation, conversation.current).at(-1)?.id,
    left: () => branches[at - 1]?.id,
    right: () => branches[at + 1]?.id,
  }[direction]();
  if (next !== undefined) branchAt(next);
}

/** Show a turn and its predecessors. The next message branches off there. */
export function branchAt(id) {
  chat.get().open.current = id;
  rerender();
}

export function setSystem(text) {
  chat.get().open.system = text;
  rerender();
}

/** Send a message after the visible turn. */
export const send = (user, think) => ask(chat.get().open, chat.get().open.current, user, think);
/** Send the same message again as a new branch. */
export const regenerate = (turn) => ask(chat.get().open, turn.parent, turn.user, turn.think);
/** Send an edited message as a new branch. */
export const edit = (turn, user) => ask(chat.get().open, turn.parent, user, turn.think);

/** Stop an answer. The service does not store a stopped turn, so the next message sends it again. */
export const stop = (conversation, turn) => running.get(runKey(conversation, turn))?.abort();

async function ask(conversation, parent, user, think) {
  const turn = addTurn(conversation, parent, user, think);
  const control = new AbortController();
  running.set(runKey(conversation, turn), control);
  say("");
  await keep(conversation);
  try {
    await answerTo(conversation, turn, control.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.reason = "stopped";
    else Object.assign(turn, { reason: "error", error: messageOf(error) });
  }
  running.delete(runKey(conversation, turn));
  conversation.updated = Date.now();
  await keep(conversation);
  await refresh();
}

/** Stream a turn's answer. Sends earlier turns again if the service has lost them, and continues after a restart. */
async function answerTo(conversation, turn, signal) {
  let resumed = 0;
  for (;;) {
    const { prompt, from } = unread(conversation, turn);
    try {
      // after a restart the answer continues where it ended
      return await streamTurn(conversation, turn, prompt + turn.answer, from, signal);
    } catch (error) {
      if (error.status === 404 && from) turnOf(conversation, from.id).dialogue = null;
      else if (turn.dropped || resumed++ >= MAX_RESUMES || !(await recovered(error, signal))) throw error;
      else turn.resumed = true;
    }
  }
}

/** The text that the service does not have, and the turn that it continues (undefined: the root). */
function unread(conversation, turn) {
  const path = pathTo(conversation, turn.id).slice(0, -1);
  const at = path.findLastIndex((one) => one.dialogue !== null);
  const missing = path.slice(at + 1);
  const texts = missing.map((one, index) => roundOf(one, at < 0 && index === 0 ? conversation.system : ""));
  texts.push(promptOf(turn, at < 0 && !missing.length ? conversation.system : ""));
  return { prompt: texts.join("\n\n"), from: path[at] };
}

/** Tokens, seconds to the first one, and tokens per second. An answer that came in one piece counts from its start. */
function speedOf(tokens, started, first) {
  const [whole, rest] = [started, first].map((from) => (performance.now() - from) / 1000);
  return { tokens, first: (first - started) / 1000, perSecond: rest > whole / 10 ? (tokens - 1) / rest : tokens / whole };
}

async function streamTurn(conversation, turn, prompt, from, signal) {
  const stops = stopsOf(turn.think);
  const { model, ...start } = chosenModel();
  // a session keeps the state and the adapter that it started with
  const body = { ...decodeFields(), ...(model ? { model } : {}), ...(from ? {} : start), contents: [prompt], session_id: conversation.id };
  if (stops) body.stop_tokens = stops;
  body.stream_options = { include_usage: true };
  const started = performance.now();
  let first = 0;
  if (!conversation.linear) body.dialogue_idx = from?.dialogue ?? ROOT;
  const path = conversation.linear ? "/state/chat/completions" : "/multi_state/chat/completions";
  for await (const event of stream(path, body, signal)) {
    if (event.error) throw new ApiError(event.error, 200, event);
    if (event.dialogue_idx !== undefined) turn.dialogue = event.dialogue_idx;
    if (event.usage) turn.speed = speedOf(event.usage.completion_tokens, started, first || performance.now());
    for (const choice of event.choices ?? []) {
      first ||= performance.now();
      grow(turn, choice.delta.content ?? "");
      if (choice.finish_reason) turn.reason = choice.finish_reason;
    }
    rerender();
  }
  if (conversation.linear) turn.dialogue = turn.id;
}

/** Give a conversation another title. */
export async function rename(id, title) {
  const conversation = chat.get().conversations.get(id);
  if (!conversation || !title.trim()) return;
  conversation.title = title.trim().slice(0, 80);
  await keep(conversation);
}

/** Delete a conversation in this browser and on the service. */
export async function remove(id) {
  try {
    if (chat.get().sessions.has(id)) await post("/state/delete", { session_id: id });
  } catch (error) {
    if (error.status !== 404) return say(messageOf(error));
  }
  await storage.remove(id).catch(() => {});
  chat.get().conversations.delete(id);
  if (chat.get().open.id === id) startNew();
  return refresh();
}

/** Download the state of the visible turn from `/state/export`. */
export async function exportState(conversation) {
  const turn = turnOf(conversation, conversation.current);
  const query = new URLSearchParams({ session_id: conversation.id });
  if (!conversation.linear) query.set("dialogue_idx", turn?.dialogue ?? "");
  try {
    const file = await (await request(`/state/export?${query}`)).blob();
    download(`${conversation.id}${conversation.linear ? "" : `-${turn.dialogue}`}.safetensors`, file);
  } catch (error) {
    say(messageOf(error));
  }
}

export const exportText = (conversation) => download(`${conversation.id}.json`, asJson(conversation), "application/json");
export const exportMarkdown = (conversation) => download(`${conversation.id}.md`, asMarkdown(conversation, parted), "text/markdown");

/** Import files, each a session's state (.safetensors) or a conversation's text, and show the last one. */
export async function importFiles(files) {
  const problems = [];
  const done = [];
  for (const file of files) {
    try {
      done.push(await (file.name.endsWith(".safetensors") ? importState : importText)(file));
    } catch (error) {
      problems.push(`${file.name}: ${messageOf(error)}`);
    }
  }
  say(problems.join("\n"), done.join("\n"));
}

async function importState(file) {
  const { id } = newConversation();
  const query = new URLSearchParams({ session_id: id });
  await request(`/state/import?${query}`, { method: "POST", body: file, type: "application/octet-stream" });
  await refresh();
  open(id);
  return t("import.state", { name: file.name });
}

async function importText(file) {
  let conversation;
  try {
    conversation = fromText(await file.text());
  } catch {
    throw new Error(t("import.unknown"));
  }
  await keep(conversation);
  open(conversation.id);
  return t("import.text", { name: file.name, count: conversation.turns.length });
}

