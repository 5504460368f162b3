// The prompt form of RWKV-7's chats, as docs/api.md's `messages` are turned into; here by hand, since branches of a
// session take raw prompts.

const NEWLINES = /\n{2,}/g;
const AFTER_THOUGHT = [0, "\n\nUser:", "\n\nSystem:", "\n\nAssistant:"];
const CLOSE = "</think>";

/** How long the model may think: what the prompt says, and what ends the answer (null: the service's default). */
const FORMS = {
  off: { hint: "", opening: "<think>\n</think>", stops: null },
  on: { hint: "", opening: "<think", stops: AFTER_THOUGHT },
  short: { hint: " (think a bit)", opening: "<think", stops: AFTER_THOUGHT },
  long: { hint: " (think a lot)", opening: "<think", stops: AFTER_THOUGHT },
};
export const THINK_MODES = Object.keys(FORMS);

export const stopsOf = (mode) => FORMS[mode].stops;

/** Rounds are parted by blank lines, so a turn's own blank lines become line breaks. */
const oneTurn = (text) => text.replace(/\r\n?/g, "\n").replace(NEWLINES, "\n").replace(/^\n+|\n+$/g, "");

/** What the model reads of one turn, up to where its answer begins. */
export function promptOf(turn, system) {
  const { hint, opening } = FORMS[turn.think];
  const round = `User: ${oneTurn(turn.user)}${hint}\n\nAssistant: ${opening}`;
  return system ? `System: ${oneTurn(system)}\n\n${round}` : round;
}

/** A turn that was read and answered, as text. */
export const roundOf = (turn, system) => promptOf(turn, system) + turn.answer.trimEnd();

/** {thought, answer, thinking}: the two parts of an answer; `thinking` while the thought has no end yet. */
export function parted(turn) {
  const text = turn.answer;
  if (turn.think === "off" || turn.dropped) return { thought: "", answer: text, thinking: false };
  const end = text.indexOf(CLOSE);
  const thought = (end < 0 ? text : text.slice(0, end)).replace(/^>/, "").trim();
  return { thought, answer: end < 0 ? "" : text.slice(end + CLOSE.length), thinking: end < 0 };
}
