// The first screen of a chat: which model answers, examples, and how to serve another model.

import { t } from "../i18n.js";
import { isDemo, service } from "../monitor.js";
import { html, useState, useStore } from "../ui.js";

const COMMAND = "rwkv-batch serve --model-path FILE.pth";
const EXAMPLES = { demo: ["demo0", "demo1", "demo2"], model: ["model0", "model1", "model2"] };

function parametersOf(count) {
  return count >= 1e9 ? `${(count / 1e9).toFixed(1)}B` : `${Math.round(count / 1e6)}M`;
}

function CopyCommand() {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(COMMAND).then(() => setCopied(true), () => {});
  return html`<p>${t("welcome.serve")}</p>
    <p class="row center"><code>${COMMAND}</code> <button type="button" onClick=${copy}>${t(copied ? "copied" : "copy")}</button></p>`;
}

/** `ask(text)` sends an example. */
export function Welcome({ ask }) {
  const now = useStore(service);
  const { status } = now;
  const about = status?.parameters && t("welcome.model", {
    name: status.model, file: status.model_file, size: parametersOf(status.parameters), dtype: status.dtype,
  });
  return html`<div class="welcome"><h2>${t("chat.welcome")}</h2>
    ${about && html`<p id="about-model">${about}</p>`}
    ${isDemo(now) && html`<p>${t("welcome.demo")}</p>`}
    ${status && html`<ul class="examples">${EXAMPLES[isDemo(now) ? "demo" : "model"].map((key) => {
      const text = t(`example.${key}`);
      return html`<li key=${key}><button type="button" onClick=${() => ask(text)}>${text}</button></li>`;
    })}</ul>`}
    <p class="about">${t("chat.about")}</p>
    ${isDemo(now) && html`<${CopyCommand} />`}
  </div>`;
}
