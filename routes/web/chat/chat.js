// The chat panel: list of chats, the open conversation and its branches.

import { DecodeParameters, ModelChoice } from "../decode.js";
import { t, useLanguage } from "../i18n.js";
import { choice, html, settings, useEffect, useLayoutEffect, useRef, useState, useStore } from "../ui.js";
import * as control from "./controller.js";
import { pathTo } from "./conversation.js";
import { Keys } from "./keys.js";
import { THINK_MODES } from "./prompt.js";
import { Sessions } from "./sessions.js";
import { Tree } from "./tree.js";
import { Turn } from "./turn.js";
import { Welcome } from "./welcome.js";

const REFRESH_MS = 10_000;
const AT_END_PX = 80;
const MAX_FILE_BYTES = 1_000_000;
const DRAFT = "rwkv.draft";

const keptThink = () => (THINK_MODES.includes(settings.get("think")) ? settings.get("think") : "off");

/** A text file as part of a message. Throws Error. */
async function quoted(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(t("chat.fileSize", { name: file.name, bytes: MAX_FILE_BYTES }));
  const content = await file.text();
  if (/[\0\ufffd]/.test(content)) throw new Error(t("chat.fileType", { name: file.name }));
  return `${file.name}:\n\`\`\`\n${content.trimEnd()}\n\`\`\`\n`;
}

/** The message that is being written. It outlives a reload of the tab. */
function useDraft() {
  const [text, setText] = useState(sessionStorage.getItem(DRAFT) ?? "");
  const write = (next) => {
    setText(next);
    try {
      sessionStorage.setItem(DRAFT, next);
    } catch {
      // a draft beyond the storage's size is lost with the page
    }
  };
  return [text, write];
}

function Composer({ running, visible, children }) {
  const [text, setText] = useDraft();
  const [problem, setProblem] = useState("");
  const field = useRef();
  const input = useRef();
  const take = async (files) => {
    setProblem("");
    try {
      const parts = await Promise.all([...files].map(quoted));
      setText((field.current.value ? [field.current.value.trimEnd(), ...parts] : parts).join("\n"));
    } catch (error) {
      setProblem(error.message);
    }
    input.current.value = "";
    field.current.focus();
  };
  const drop = (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  };
  const [think, setThink] = useState(keptThink());
  useEffect(() => {
    if (visible && !matchMedia("(pointer: coarse)").matches) field.current.focus();
  }, [visible]);
  const submit = (event) => {
    event?.preventDefault();
    if (!text.trim() || running) return;
    setText("");
    control.send(text, think);
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  };
  const choose = (mode) => {
    setThink(mode);
    settings.set("think", mode);
  };
  return html`<form class="composer" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()} onDrop=${drop}>
    <textarea id="question" ref=${field} aria-label=${t("chat.question")} placeholder=${t(innerWidth > 900 ? "chat.placeholder" : "chat.question")} rows=${innerWidth > 900 ? 3 : 2} value=${text}
      onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${key}></textarea>
    <div class="row">
      ${choice("think", t("think.label"), think, choose, THINK_MODES, (mode) => t(`think.${mode}`))}
      <button type="button" onClick=${() => input.current.click()}>${t("chat.attach")}</button>
      <input ref=${input} id="chat-file" type="file" hidden multiple aria-label=${t("chat.attach")} onChange=${(event) => take(event.currentTarget.files)} />
      ${children}<span class="space"></span>
      ${running
        ? html`<button type="button" id="stop" onClick=${running}>${t("chat.stop")}</button>`
        : html`<button class="main" id="send" disabled=${!text.trim()}>${t("chat.send")}</button>`}
    </div>
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
  </form>`;
}

function Exports({ conversation, path }) {
  const last = path.at(-1);
  if (!last) return null;
  const kept = last.dialogue !== null;
  return html`<details class="menu"><summary>${t("export.title")}</summary>
    <button onClick=${() => control.exportState(conversation)} disabled=${!kept}>${t("export.state")}</button>
    <button onClick=${() => control.exportText(conversation)}>${t("export.text")}</button>
    <button onClick=${() => control.exportMarkdown(conversation)}>${t("export.markdown")}</button>
  </details>`;
}

/** The turns of the visible branch. Scrolls with a growing answer unless the user has scrolled up. */
function Transcript({ conversation, path }) {
  const box = useRef();
  const follows = useRef(true);
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    follows.current = scrollHeight - scrollTop - clientHeight < AT_END_PX;
  };
  useLayoutEffect(() => {
    if (path.length === 0) box.current.scrollTop = 0;
    else if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  });
  useLayoutEffect(() => {
    follows.current = true;
  }, [conversation.id, path.length]);
  return html`<div class="transcript" ref=${box} onScroll=${scrolled} tabindex="0" role="log" aria-label=${t("chat.transcript")} aria-live="off">
    ${path.length === 0 && html`<${Welcome} ask=${(text) => control.send(text, keptThink())} />`}
    ${path.map((turn) => html`<${Turn} key=${`${conversation.id}/${turn.id}`} conversation=${conversation} turn=${turn} />`)}
  </div>`;
}

/** Announces answers to screen readers. */
function AnswerAnnouncer({ busy }) {
  const was = useRef(false);
  const [text, setText] = useState("");
  useEffect(() => {
    if (busy !== was.current) setText(t(busy ? "chat.answering" : "chat.answered"));
    was.current = busy;
  }, [busy]);
  return html`<div class="unseen" role="status">${text}</div>`;
}

export function Chat({ visible }) {
  useLanguage();
  const { open: conversation, problem, done } = useStore(control.chat);
  useEffect(() => {
    control.begin();
  }, []);
  useEffect(() => {
    if (!visible) return undefined;
    const timer = setInterval(control.refresh, REFRESH_MS);
    return () => clearInterval(timer);
  }, [visible]);
  const path = pathTo(conversation, conversation.current);
  const growing = conversation.turns.find((turn) => control.isRunning(conversation, turn));
  const busy = Boolean(growing);
  const stop = busy ? () => control.stop(conversation, growing) : null;
  return html`<div class="chat">
    <details class="side left" open=${innerWidth > 900}><summary>${t("sessions.title")}</summary><${Sessions} /></details>
    <div class="middle">
      <div class="row head"><details class="system"><summary>${t("chat.system")}</summary>
        <textarea id="system" rows="2" aria-label=${t("chat.system")} disabled=${conversation.turns.length > 0} value=${conversation.system} onInput=${(event) => control.setSystem(event.currentTarget.value)}></textarea>
      </details><${ModelChoice} prefix="chat" visible=${visible} /><${DecodeParameters} prefix="chat" /><${Exports} conversation=${conversation} path=${path} /></div>
      <${Transcript} conversation=${conversation} path=${path} />
      ${problem && html`<p class="bad lines" role="alert">${problem === "offline" ? t("notice.offline") : problem}</p>`}
      <p class="good lines" role="status" id="chat-done">${done}</p>
      <${Composer} running=${stop} visible=${visible}><${Keys} active=${visible} stop=${stop ?? (() => {})} /><//>
      <${AnswerAnnouncer} busy=${busy} />
    </div>
    <details class="side right" open=${innerWidth > 900} hidden=${!conversation.turns.length}><summary>${t("tree.title")}</summary><${Tree} conversation=${conversation} /></details>
  </div>`;
}
