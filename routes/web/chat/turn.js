// One visible turn: message, reasoning, answer and buttons.

import { number, t } from "../i18n.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { Answer } from "./answer.js";
import * as control from "./controller.js";
import { childrenOf } from "./conversation.js";
import { parted } from "./prompt.js";

function Editor({ turn, close }) {
  const [text, setText] = useState(turn.user);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (!text.trim()) return;
    close();
    control.edit(turn, text);
  };
  return html`<form onSubmit=${submit} onKeyDown=${(event) => event.key === "Escape" && close()}>
    <textarea ref=${field} aria-label=${t("chat.edit")} value=${text} onInput=${(event) => setText(event.currentTarget.value)} rows="3"></textarea>
    <button class="main">${t("chat.branch")}</button> <button type="button" onClick=${close}>${t("cancel")}</button>
  </form>`;
}

/** Selects one of several alternative turns. */
function Siblings({ conversation, turn }) {
  const all = childrenOf(conversation, turn.parent);
  const at = all.indexOf(turn);
  if (all.length < 2) return null;
  const step = (by) => control.show(all[at + by].id);
  return html`<span class="siblings">
    <button class="plain" disabled=${at === 0} onClick=${() => step(-1)} aria-label=${t("chat.previous")}>‹</button>
    ${at + 1}/${all.length}
    <button class="plain" disabled=${at === all.length - 1} onClick=${() => step(1)} aria-label=${t("chat.next")}>›</button>
  </span>`;
}

function Ending({ turn }) {
  if (turn.error !== null) return html`<p class="bad" role="alert">${turn.error === "offline" ? t("notice.offline") : turn.error}</p>`;
  if (turn.reason && turn.reason !== "stop") return html`<p class="quiet">${t(`reason.${turn.reason}`)}</p>`;
  return null;
}

/** A message and its answer. */
export function Turn({ conversation, turn }) {
  const [editing, setEditing] = useState(false);
  const [copied, setCopied] = useState(false);
  const busy = control.isRunning(conversation, turn);
  const { thought, answer, thinking } = parted(turn);
  const copy = () => navigator.clipboard.writeText(answer.trim()).then(() => setCopied(true), () => {});
  if (turn.foreign) return html`<article class="turn"><p class="quiet">${t("chat.foreign", { dialogue: turn.dialogue })}</p></article>`;
  return html`<article class="turn" data-turn=${turn.id} aria-busy=${busy}>
    <div class="user"><span class="who">${t("chat.you")}</span>${editing ? html`<${Editor} turn=${turn} close=${() => setEditing(false)} />` : html`<div class="text">${turn.user}</div>`}</div>
    <div class="assistant"><span class="who">${t("chat.model")}</span>
      ${thought && html`<details class="thought"><summary>${t(thinking && busy ? "chat.thinking" : "chat.thought")}</summary><div class="text">${thought}</div></details>`}
      ${turn.dropped > 0 && html`<p class="quiet">${t("chat.dropped", { count: turn.dropped })}</p>`}
      <${Answer} text=${answer.trimStart()} dropped=${turn.dropped} />
      ${busy && html`<span class="cursor" aria-hidden="true"></span>`}
      ${turn.resumed && html`<p class="quiet resumed">${t("chat.resumed")}</p>`}
      <${Ending} turn=${turn} />
    </div>
    <div class="actions">
      <${Siblings} conversation=${conversation} turn=${turn} />
      ${busy
        ? html`<button onClick=${() => control.stop(conversation, turn)}>${t("chat.stop")}</button>`
        : html`${!conversation.linear && html`
            <button class="plain" onClick=${() => control.regenerate(turn)}>${t("chat.regenerate")}</button>
            <button class="plain" onClick=${() => setEditing(!editing)}>${t("chat.edit")}</button>`}
            <button class="plain" onClick=${copy}>${t(copied ? "copied" : "copy")}</button>`}
      ${turn.speed && html`<small class="speed">${t("chat.speed", { tokens: number(turn.speed.tokens), first: number(turn.speed.first, 2), speed: number(turn.speed.perSecond) })}</small>`}
    </div>
  </article>`;
}
