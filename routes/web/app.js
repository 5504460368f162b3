// The page: header, notices, password dialog and one visible panel. Hidden panels keep running.

import { Admin } from "./admin/admin.js";
import { password, passwordWanted } from "./api.js";
import { Batch } from "./batch/batch.js";
import { Chat } from "./chat/chat.js";
import { Dashboard } from "./dashboard/dashboard.js";
import { keepSamples } from "./dashboard/series.js";
import { language, nextLanguage, t, useLanguage } from "./i18n.js";
import { service, startPolling } from "./monitor.js";
import { Translate } from "./translate/translate.js";
import { Tune } from "./tune/tune.js";
import { createStore, html, render, settings, useEffect, useRef, useState, useStore } from "./ui.js";

const PANELS = { chat: Chat, batch: Batch, translate: Translate, tune: Tune, dashboard: Dashboard, admin: Admin };
/** /status names processes only to administrators. */
const panelsFor = (status) => Object.keys(PANELS).filter((name) => name !== "admin" || status?.processes);
const THEMES = ["auto", "light", "dark"];

const shown = createStore(panelOfUrl());
const theme = createStore(THEMES.includes(settings.get("theme")) ? settings.get("theme") : "auto");

function panelOfUrl() {
  const name = location.hash.slice(1);
  return name in PANELS ? name : "chat";
}

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  settings.set("theme", name);
}

function Header() {
  const panel = useStore(shown);
  const { status } = useStore(service);
  const signedIn = !useStore(passwordWanted) && password.get();
  const now = useStore(theme);
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  const other = nextLanguage();
  const signOut = () => {
    password.forget();
    location.reload();
  };
  return html`<header>
    <div class="brand"><h1>rwkv-batch</h1> <span class="quiet" id="model">${status?.model ?? ""}</span></div>
    <nav aria-label=${t("nav")}>
      ${panelsFor(status).map(
        (name) => html`<a href="#${name}" aria-current=${panel === name ? "page" : null}>${t(`panel.${name}`)}</a>`,
      )}
    </nav>
    <div class="switches">
      <button class="plain" onClick=${() => language.set(other.name)} lang=${other.tag}>${other.title}</button>
      <button class="plain" onClick=${() => theme.set(next)} title=${t("switch.theme")}>${t(`theme.${now}`)}</button>
      ${signedIn && html`<button class="plain" onClick=${signOut}>${t("password.forget")}</button>`}
    </div>
  </header>`;
}

/** Shows when the engine is unavailable and when it is back. */
function Notice() {
  const { state, reason, restarts, status } = useStore(service);
  const [back, setBack] = useState(false);
  useEffect(() => {
    if (!restarts) return undefined;
    setBack(true);
    const timer = setTimeout(() => setBack(false), 20_000);
    return () => clearTimeout(timer);
  }, [restarts]);
  let text = "";
  const isLost = state === "unreachable" && (status || !reason);
  if (state === "unreachable") text = reason ? t(status ? "notice.away" : "notice.starting", { reason }) : t("notice.offline");
  else if (back) text = t("notice.back");
  return html`<div role="status" id="notice" class=${text ? (isLost ? "notice bad" : "notice") : ""}>${text}</div>`;
}

function PasswordDialog() {
  const wanted = useStore(passwordWanted);
  const dialog = useRef();
  const input = useRef();
  useEffect(() => {
    if (wanted && !dialog.current.open) dialog.current.showModal();
    if (!wanted && dialog.current.open) dialog.current.close();
    if (wanted) input.current.focus();
  }, [wanted]);
  const submit = (event) => {
    event.preventDefault();
    wanted.resolve(input.current.value);
    input.current.value = "";
  };
  return html`<dialog ref=${dialog} aria-labelledby="password-title" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${submit}>
      <h2 id="password-title">${t("password.title")}</h2>
      <p id="password-why">${wanted?.message ? t("password.wrong", wanted) : t("password.why")}</p>
      <input type="text" autocomplete="username" value="rwkv-batch" hidden />
      <label>${t("password.label")}
        <input ref=${input} id="password" type="password" autocomplete="current-password" required aria-describedby="password-why" />
      </label>
      <p><button class="main">${t("password.send")}</button></p>
    </form>
  </dialog>`;
}

function App() {
  useLanguage();
  const panel = useStore(shown);
  return html`
    <${Header} />
    <${Notice} />
    <main>
      ${Object.entries(PANELS).map(
        ([name, Panel]) => html`<section key=${name} id="panel-${name}" aria-label=${t(`panel.${name}`)} hidden=${panel !== name}
          tabindex=${name === "dashboard" ? "0" : null}>
          <${Panel} visible=${panel === name} />
        </section>`,
      )}
    </main>
    <footer><a href="docs">${t("footer.api")}</a></footer>
    <${PasswordDialog} />`;
}

addEventListener("hashchange", () => shown.set(panelOfUrl()));
theme.subscribe(applyTheme);
applyTheme(theme.get());
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
keepSamples();
startPolling();
