// A conversation as a tree of turns. The service stores each turn as a dialogue of a session.
// Plain data and pure functions.

export const ROOT = 0;
/** Maximum length of an answer's text. The beginning of a longer answer is dropped. */
const ANSWER_LIMIT = 200_000;

/**
 * A conversation. `linear`: the session has no branches (imported or started elsewhere).
 * `turns`: {id, parent, user, think, answer, dropped, dialogue, reason, error}. `dialogue`: the turn's number on the
 * service, null if it is not stored. `current`: the last visible turn.
 */
export function newConversation({ id = newId(), linear = false, title = "" } = {}) {
  return { id, linear, title, system: "", turns: [], current: ROOT, updated: Date.now() };
}

const newId = () => `chat-${Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;

export const turnOf = (conversation, id) => conversation.turns.find((turn) => turn.id === id);
export const childrenOf = (conversation, id) => conversation.turns.filter((turn) => turn.parent === id);

/** The turns from the root to `id`. */
export function pathTo(conversation, id) {
  const path = [];
  for (let turn = turnOf(conversation, id); turn; turn = turnOf(conversation, turn.parent)) path.unshift(turn);
  return path;
}

/** The last turn below `id`, along the newest branches. */
export function newestBelow(conversation, id) {
  for (;;) {
    const child = childrenOf(conversation, id).at(-1);
    if (!child) return id;
    id = child.id;
  }
}

/** Add a turn after `parent`, show it and return it. */
export function addTurn(conversation, parent, user, think) {
  const id = Math.max(0, ...conversation.turns.map((turn) => turn.id)) + 1;
  const turn = { id, parent, user, think, answer: "", dropped: 0, dialogue: null, reason: null, error: null };
  conversation.turns.push(turn);
  conversation.current = id;
  conversation.updated = Date.now();
  if (!conversation.title) conversation.title = user.trim().split("\n")[0].slice(0, 80);
  return turn;
}

/** Append new text to a turn's answer. */
export function grow(turn, text) {
  turn.answer += text;
  const over = turn.answer.length - ANSWER_LIMIT;
  if (over > ANSWER_LIMIT) {
    turn.answer = turn.answer.slice(over);
    turn.dropped += over;
  }
}

/** Parse a listed name: "chat-1:2" -> {session: "chat-1", dialogue: 2}. A plain session has dialogue null. */
export function parsedName(shown) {
  const match = /^(.+):(\d+)$/.exec(shown);
  return match ? { session: match[1], dialogue: Number(match[2]) } : { session: shown, dialogue: null };
}

/** Add turns for dialogues without text in this browser, so that the user can continue them. */
export function adoptDialogues(conversation, dialogues) {
  const known = new Set(conversation.turns.map((turn) => turn.dialogue));
  for (const dialogue of dialogues) {
    if (known.has(dialogue)) continue;
    const turn = addTurn(conversation, ROOT, "", "off");
    Object.assign(turn, { dialogue, reason: "stop", foreign: true });
  }
}

/** The visible branch as Markdown. */
export function asMarkdown(conversation, parted) {
  const rounds = pathTo(conversation, conversation.current).map((turn) => {
    const { answer } = parted(turn);
    return `## User\n\n${turn.user}\n\n## Assistant\n\n${answer.trim()}\n`;
  });
  return `# ${conversation.title || conversation.id}\n\n${conversation.system ? `> ${conversation.system}\n\n` : ""}${rounds.join("\n")}`;
}

/** A conversation from an export or a file of the terminal. The service has none of its turns. Throws Error. */
export function fromText(text) {
  if (!text.trimStart().startsWith("{")) return fromMarkdown(text);
  const data = JSON.parse(text);
  return data.branches ? fromTerminal(data) : revived(data);
}

/** A conversation from the JSON of `rwkv-batch chat`'s /save. Branches share the turns with which they begin. */
function fromTerminal({ branch, branches, settings }) {
  const conversation = { ...newConversation(), system: String(settings?.system ?? "") };
  for (const [name, messages] of Object.entries(branches)) {
    let at = ROOT;
    messages.forEach(({ role, content }, index) => {
      if (role === "system") conversation.system = content;
      if (role !== "user") return;
      const { content: answer = "" } = messages[index + 1] ?? {};
      const known = childrenOf(conversation, at).find((turn) => turn.user === content && turn.answer === ` ${answer}`);
      at = (known ?? Object.assign(addTurn(conversation, at, content, "off"), { answer: ` ${answer}`, reason: "stop" })).id;
    });
    branches[name] = at;
  }
  return { ...conversation, current: branches[branch] };
}

function fromMarkdown(text) {
  const [head, ...rounds] = text.replace(/\r\n?/g, "\n").split(/^## User\n/m);
  if (!rounds.length) throw new Error("no heading “## User”");
  const title = /^# (.*)$/m.exec(head)?.[1] ?? "";
  const system = /^> (.*)$/m.exec(head)?.[1] ?? "";
  const conversation = { ...newConversation({ title: title.slice(0, 80) }), system };
  for (const round of rounds) {
    const [user, answer = ""] = round.split(/^## Assistant\n/m);
    Object.assign(addTurn(conversation, conversation.current, user.trim(), "off"), { answer: ` ${answer.trim()}`, reason: "stop" });
  }
  return conversation;
}

/** The content of a text export, for `revived`. */
export const asJson = (conversation) => JSON.stringify({ format: "rwkv-batch conversation", version: 1, ...conversation }, null, 1);

/** A conversation from the JSON of an export. */
function revived(data) {
  if (data.format !== "rwkv-batch conversation" || !Array.isArray(data.turns)) throw new Error("not a conversation");
  const turns = data.turns.map((turn) => ({
    id: Number(turn.id),
    parent: Number(turn.parent),
    user: String(turn.user ?? ""),
    think: ["off", "on", "short", "long"].includes(turn.think) ? turn.think : "off",
    answer: String(turn.answer ?? ""),
    dropped: 0,
    dialogue: null,
    reason: turn.reason ? String(turn.reason) : null,
    error: null,
  }));
  if (turns.some((turn) => !(turn.id > turn.parent && turn.parent >= ROOT))) throw new Error("its turns make no tree");
  const current = turns.some((turn) => turn.id === data.current) ? data.current : (turns.at(-1)?.id ?? ROOT);
  return { ...newConversation({ title: String(data.title ?? "") }), system: String(data.system ?? ""), turns, current };
}
