// The prompt format of RWKV-7 chats, the same as for `messages` in docs/api.md. It is built here because branches of a
// session take raw prompts.

const NEWLINES = /\n{2,}/g;
const AFTER_THOUGHT = [0, "\n\nUser:", "\n\nSystem:", "\n\nAssistant:"];
const CLOSE = "</think>";

/** Think modes: text in the prompt, and stops of the answer (null: the service's default). */
const FORMS = {
  off: { hint: "", opening: "<think>\n</think>", stops: null },
  on: { hint: "", opening: "<think", stops: AFTER_THOUGHT },
  short: { hint: " (think a bit)", opening: "<think", stops: AFTER_THOUGHT },
  long: { hint: " (think a lot)", opening: "<think", stops: AFTER_THOUGHT },
};
export const THINK_MODES = Object.keys(FORMS);

export const stopsOf = (mode) => FORMS[mode].stops;

/** Blank lines separate turns, so blank lines within a turn become line breaks. */
const oneTurn = (text) => text.replace(/\r\n?/g, "\n").replace(NEWLINES, "\n").replace(/^\n+|\n+$/g, "");

/** The prompt of one turn, up to its answer. */
export function promptOf(turn, system) {
  const { hint, opening } = FORMS[turn.think];
  const round = `User: ${oneTurn(turn.user)}${hint}\n\nAssistant: ${opening}`;
  return system ? `System: ${oneTurn(system)}\n\n${round}` : round;
}

/** An answered turn as text. */
export const roundOf = (turn, system) => promptOf(turn, system) + turn.answer.trimEnd();

/** Split an answer into {thought, answer, thinking}. `thinking`: the thought is incomplete. */
export function parted(turn) {
  const text = turn.answer;
  if (turn.think === "off" || turn.dropped) return { thought: "", answer: text, thinking: false };
  const end = text.indexOf(CLOSE);
  const thought = (end < 0 ? text : text.slice(0, end)).replace(/^>/, "").trim();
  return { thought, answer: end < 0 ? "" : text.slice(end + CLOSE.length), thinking: end < 0 };
}
