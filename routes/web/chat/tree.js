// The tree of a conversation's branches. The service stores the state of each turn, so a branch needs no recomputation.

import { t } from "../i18n.js";
import { html, useLayoutEffect, useRef } from "../ui.js";
import * as control from "./controller.js";
import { ROOT, childrenOf, pathTo } from "./conversation.js";

function Node({ turn, shown, current }) {
  const label = turn.foreign ? t("chat.dialogue", { dialogue: turn.dialogue }) : turn.user.trim().slice(0, 48);
  return html`<button class=${shown ? "node shown" : "node"} aria-current=${current ? "step" : null} onClick=${() => control.branchAt(turn.id)}
    title=${turn.dialogue === null ? t("tree.unkept") : t("chat.dialogue", { dialogue: turn.dialogue })}>
    <span class=${turn.dialogue === null ? "dot hollow" : "dot"} aria-hidden="true"></span>${label}</button>`;
}

/** The turns below `from`: one line for a single successor, a nested list for branches. */
function Branch({ conversation, from, path }) {
  const line = [];
  let children = childrenOf(conversation, from);
  while (children.length === 1) {
    line.push(children[0]);
    children = childrenOf(conversation, children[0].id);
  }
  const node = (turn) => html`<${Node} turn=${turn} shown=${path.has(turn.id)} current=${turn.id === conversation.current} />`;
  return html`
    ${line.map((turn) => html`<li key=${turn.id}>${node(turn)}</li>`)}
    ${children.map((turn) => html`<li key=${turn.id} class="fork">${node(turn)}<ul><${Branch} conversation=${conversation} from=${turn.id} path=${path} /></ul></li>`)}`;
}

const ARROWS = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" };

/** The whole tree. A click or an arrow key shows another turn, and the next message branches off there. */
export function Tree({ conversation }) {
  const box = useRef();
  const walks = useRef(false);
  const key = (event) => {
    if (!ARROWS[event.key]) return;
    event.preventDefault();
    walks.current = true;
    control.walk(ARROWS[event.key]);
  };
  useLayoutEffect(() => {
    if (walks.current) box.current.querySelector("[aria-current]")?.focus();
    walks.current = false;
  }, [conversation.current]);
  const path = new Set(pathTo(conversation, conversation.current).map((turn) => turn.id));
  return html`<div class="tree" ref=${box} onKeyDown=${key}>
    <h2>${t("tree.title")}</h2>
    <ul><li><button class=${conversation.current === ROOT ? "node shown" : "node"} aria-current=${conversation.current === ROOT ? "step" : null} onClick=${() => control.branchAt(ROOT)}><span class="dot" aria-hidden="true"></span>${t("tree.root")}</button></li>
      <${Branch} conversation=${conversation} from=${ROOT} path=${path} /></ul>
  </div>`;
}
