// Keys of the chat panel, and the dialog that lists them.

import { t } from "../i18n.js";
import { html, useEffect, useRef } from "../ui.js";

const KEYS = ["Enter", "Ctrl+Enter", "Shift+Enter", "Esc", "↑ ↓ ← →", "?"];
const EDITABLE = "input, textarea, select";

/** Call `stop` on Escape and show the dialog on "?", while `active`. Returns the dialog and its button. */
export function Keys({ active, stop }) {
  const dialog = useRef();
  const act = useRef();
  act.current = stop;
  useEffect(() => {
    if (!active) return undefined;
    const pressed = (event) => {
      if (event.key === "Escape" && !dialog.current.open) act.current();
      if (event.key === "?" && !event.target.matches(EDITABLE)) dialog.current.showModal();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [active]);
  return html`<button type="button" class="plain keys" aria-label=${t("keys.title")} title=${t("keys.title")} onClick=${() => dialog.current.showModal()}>?</button>
  <dialog ref=${dialog} aria-labelledby="keys-title">
    <h2 id="keys-title">${t("keys.title")}</h2>
    <dl>${KEYS.map((key) => html`<dt><kbd>${key}</kbd></dt><dd>${t(`keys.${key}`)}</dd>`)}</dl>
    <button onClick=${() => dialog.current.close()}>${t("close")}</button>
  </dialog>`;
}
