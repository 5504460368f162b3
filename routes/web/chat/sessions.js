// The list of chats: this browser's conversations and the service's sessions, with their tiers.

import { locale, t } from "../i18n.js";
import { html, useRef, useState, useStore } from "../ui.js";
import { firstTier, service } from "../monitor.js";
import * as control from "./controller.js";

export const TIERS = { L1: "vram", L2: "ram", Da: "disk" };

function entries({ conversations, sessions }) {
  const all = new Map();
  for (const one of conversations.values()) all.set(one.id, { id: one.id, title: one.title || one.id, updated: one.updated, isHere: true });
  for (const one of sessions.values()) {
    const known = all.get(one.id);
    all.set(one.id, { title: one.id, ...known, id: one.id, session: one, updated: Math.max(known?.updated ?? 0, one.updated * 1000) });
  }
  return [...all.values()].sort((one, other) => other.updated - one.updated);
}

function Entry({ entry, shown }) {
  const first = firstTier(useStore(service));
  const tier = entry.session ? TIERS[entry.session.tier.slice(0, 2)] : "none";
  const when = new Date(entry.updated).toLocaleString(locale(), { dateStyle: "short", timeStyle: "short" });
  const remove = () => confirm(t("sessions.confirm", { name: entry.title })) && control.remove(entry.id);
  const rename = () => control.rename(entry.id, prompt(t("sessions.newName"), entry.title) ?? "");
  return html`<li class=${shown ? "shown" : ""}>
    <button class="plain name" aria-current=${shown ? "true" : null} onClick=${() => control.open(entry.id)}>
      <span class="title">${entry.title}</span>
      <small>${when} <span class="tier ${tier}" title=${entry.session?.tier ?? ""}>${t(`tier.${tier === "vram" ? first : tier}`)}</span>
      ${entry.session?.dialogues.length > 1 ? ` ${t("sessions.branches", { count: entry.session.dialogues.length })}` : ""}</small>
    </button>
    ${entry.isHere && html`<button class="plain" onClick=${rename} aria-label=${t("sessions.rename", { name: entry.title })}>✎</button>`}
    <button class="plain" onClick=${remove} aria-label=${t("sessions.delete", { name: entry.title })}>✕</button>
  </li>`;
}

/** The list, with the buttons to start or import a chat. */
export function Sessions() {
  const state = useStore(control.chat);
  const file = useRef();
  const take = async (event) => {
    await control.importFiles(event.currentTarget.files);
    file.current.value = "";
  };
  const { counts } = state;
  const first = t(`tier.${firstTier(useStore(service))}`);
  const [wanted, setWanted] = useState("");
  const isWanted = (entry) => entry.title.toLowerCase().includes(wanted.trim().toLowerCase());
  const found = entries(state).filter(isWanted);
  const [mine, others] = [found.filter((entry) => entry.isHere), found.filter((entry) => !entry.isHere)];
  const item = (entry) => html`<${Entry} key=${entry.id} entry=${entry} shown=${entry.id === state.open.id} />`;
  return html`<div class="sessions">
    <p class="row"><button class="main" onClick=${control.startNew}>${t("chat.new")}</button>
      <button onClick=${() => file.current.click()}>${t("sessions.import")}</button>
      <input ref=${file} id="import-file" type="file" hidden multiple accept=".safetensors,.json,.md" aria-label=${t("sessions.import")} onChange=${take} /></p>
    <h2>${t("sessions.title")}</h2>
    ${counts && html`<p class="quiet" id="tiers" hidden=${!counts.total_sessions}>${t("sessions.counts", { total: counts.total_sessions, vram: counts.l1_cache_count, first, ram: counts.l2_cache_count, disk: counts.database_count })}</p>`}
    <input type="search" id="chat-search" aria-label=${t("sessions.search")} placeholder=${t("sessions.search")} value=${wanted} onInput=${(event) => setWanted(event.currentTarget.value)} />
    ${wanted && !found.length && html`<p class="quiet" role="status">${t("sessions.none", { text: wanted })}</p>`}
    <ul id="my-chats">${mine.map(item)}</ul>
    ${others.length > 0 && html`<details id="other-sessions" open=${others.some((entry) => entry.id === state.open.id)}><summary>${t("sessions.others", { count: others.length })}</summary>
      <ul>${others.map(item)}</ul>
      ${counts?.total_sessions > state.listed && html`<button onClick=${control.listMore}>${t("more")}</button>`}</details>`}
  </div>`;
}
