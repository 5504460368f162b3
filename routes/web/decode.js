// Parameters of requests. Names, limits and defaults are from the service's OpenAPI document, values from the user.

import { request } from "./api.js";
import { t, useLanguage } from "./i18n.js";
import { createStore, html, settings, useEffect, useStore } from "./ui.js";

const NAMES = ["temperature", "top_p", "top_k", "alpha_presence", "alpha_frequency", "alpha_decay", "max_tokens", "seed"];
const SCHEMA = "TurnBody";
/** Values by name. Other values are kept. */
const PRESETS = {
  precise: { temperature: 0.3, top_p: 0.3 },
  balanced: {},
  free: { temperature: 1.3, top_p: 0.8 },
};

function kept() {
  try {
    return JSON.parse(settings.get("decode")) ?? {};
  } catch {
    return {};
  }
}

/** Values that differ from the service's defaults. */
const values = createStore(kept());
values.subscribe((now) => settings.set("decode", JSON.stringify(now)));
/** Field -> {default, description, lowest, highest, whole}. Empty until the document is loaded. */
const described = createStore({});
const models = createStore([]);
const model = createStore("");

export const decodeFields = () => ({ ...values.get() });
export const chosenModel = () => (model.get() ? { model: model.get() } : {});

const branch = (field) => (field.anyOf ?? [field]).find((one) => one.type !== "null");

async function describe() {
  const { components } = await (await request("/openapi.json")).json();
  const fields = components.schemas[SCHEMA].properties;
  const found = {};
  for (const name of NAMES) {
    const { minimum, maximum, exclusiveMaximum, type } = branch(fields[name]);
    const highest = maximum ?? exclusiveMaximum;
    found[name] = { default: fields[name].default, description: fields[name].description, lowest: minimum, highest, whole: type === "integer" };
  }
  described.set(found);
  models.set((await (await request("/v1/models")).json()).data.map((one) => one.id));
}

function change(name, field, text) {
  values.set((known) => {
    const { [name]: _, ...others } = known;
    const value = Number(text);
    return text.trim() === "" || !Number.isFinite(value) || value === field.default ? others : { ...others, [name]: value };
  });
}

function usePreset(preset) {
  values.set(({ temperature: _, top_p: __, ...others }) => ({ ...others, ...PRESETS[preset] }));
}

/** One number input with its description. `prefix` makes its id unique. */
function Parameter({ name, field, prefix }) {
  const now = useStore(values)[name];
  const id = `${prefix}-${name}`;
  return html`<div class="parameter">
    <label for=${id}>${name}</label>
    <input id=${id} type="number" step=${field.whole ? 1 : "any"} min=${field.lowest} max=${field.highest > 2 ** 31 ? undefined : field.highest}
      value=${now ?? ""} placeholder=${field.default ?? ""} aria-describedby="${id}-meaning"
      onChange=${(event) => change(name, field, event.currentTarget.value)} />
    <small id="${id}-meaning">${t(`decode.${name}`) === `decode.${name}` ? field.description : t(`decode.${name}`)}</small>
  </div>`;
}

/** The parameters, collapsed by default. */
export function DecodeParameters({ prefix }) {
  useLanguage();
  const fields = useStore(described);
  const names = useStore(models);
  const changed = Object.keys(useStore(values)).length;
  useEffect(() => {
    if (!Object.keys(described.get()).length) describe().catch(() => {});
  }, []);
  return html`<details class="parameters">
    <summary>${t("decode.title")}${changed ? ` (${t("decode.changed", { count: changed })})` : ""}</summary>
    ${names.length > 1 && html`<label>${t("decode.model")}
      <select onChange=${(event) => model.set(event.currentTarget.value)}>${names.map((name) => html`<option selected=${name === model.get()}>${name}</option>`)}</select>
    </label>`}
    <p class="row" role="group" aria-label=${t("decode.presets")}>${Object.keys(PRESETS).map((preset) => html`<button onClick=${() => usePreset(preset)}>${t(`preset.${preset}`)}</button>`)}</p>
    <div class="grid">${Object.entries(fields).map(([name, field]) => html`<${Parameter} key=${name} ...${{ name, field, prefix }} />`)}</div>
    <button onClick=${() => values.set({})} disabled=${!changed}>${t("decode.reset")}</button>
  </details>`;
}
