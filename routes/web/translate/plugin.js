// Settings for the browser plugin immersive-translate, with a test.

import { address, password } from "../api.js";
import { t } from "../i18n.js";
import { html, useState } from "../ui.js";
import { checkRoute } from "./work.js";

function CopyField({ id, label, value, secret }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(value).then(() => setCopied(true), () => {});
  return html`<div class="copyfield"><label for=${id}>${label}</label>
    <input id=${id} type=${secret ? "password" : "text"} readonly value=${value} autocomplete="off" />
    <button onClick=${copy} aria-label=${`${t("copy")}: ${label}`}>${t(copied ? "copied" : "copy")}</button></div>`;
}

/** The settings, folded. */
export function ImmersiveTranslate() {
  const [result, setResult] = useState(null);
  const check = async () => {
    setResult({ text: t("plugin.checking") });
    try {
      setResult({ good: true, text: t("plugin.works", { text: await checkRoute() }) });
    } catch (error) {
      setResult({ good: false, text: error.message || t("notice.offline") });
    }
  };
  const secret = password.get();
  return html`<details class="plugin"><summary>${t("plugin.title")}</summary>
    <p>${t("plugin.about")}</p>
    <${CopyField} id="plugin-url" label=${t("plugin.url")} value=${address("/translate/v1/batch-translate").href} />
    ${secret && html`<${CopyField} id="plugin-password" label=${t("plugin.password")} value=${secret} secret=${true} />`}
    <p class="row"><button id="plugin-check" onClick=${check}>${t("plugin.check")}</button>
      <span id="plugin-result" role="status" class=${result?.good ? "good" : result?.good === false ? "bad" : ""}>${result?.text ?? ""}</span></p>
  </details>`;
}
