// Parameters of requests. Names, limits and defaults are from the service's OpenAPI document, values from the user.

import { json } from "./api.js";
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
/** What a request may name, by field: names that the service lists. */
const CHOICES = {
  model: { path: "/v1/models", name: (one) => one.id },
  state: { path: "/v1/states", name: (one) => one.name },
  adapter: { path: "/v1/adapters", name: (one) => one.name },
};
const listed = createStore({});
const chosen = createStore({});

export const decodeFields = () => ({ ...values.get() });
/** The chosen model, tuned state and adapter, as fields of a request. */
export const chosenModel = () => ({ ...chosen.get() });

/** Load the names again. A name that is gone is no longer chosen. */
export async function loadChoices() {
  for (const [field, { path, name }] of Object.entries(CHOICES)) {
    const names = await json(path).then(({ data }) => data.map(name)).catch(() => null);
    if (!names) continue;
    listed.set((known) => ({ ...known, [field]: names }));
    if (!names.includes(chosen.get()[field])) choose(field, "");
  }
}

const choose = (field, name) => chosen.set(({ [field]: _, ...others }) => (name ? { ...others, [field]: name } : others));

const branch = (field) => (field.anyOf ?? [field]).find((one) => one.type !== "null");

async function describe() {
  const { components } = await json("/openapi.json");
  const fields = components.schemas[SCHEMA].properties;
  const found = {};
  for (const name of NAMES) {
    const { minimum, maximum, exclusiveMaximum, type } = branch(fields[name]);
    const highest = maximum ?? exclusiveMaximum;
    found[name] = { default: fields[name].default, description: fields[name].description, lowest: minimum, highest, whole: type === "integer" };
  }
  described.set(found);
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

/** Selects for model, tuned state and adapter, each if there is a choice. They are loaded again when `visible` changes. */
export function ModelChoice({ prefix, visible }) {
  useLanguage();
  const names = useStore(listed);
  const now = useStore(chosen);
  useEffect(() => {
    if (visible) loadChoices();
  }, [visible]);
  const none = { model: null, state: t("decode.noState"), adapter: t("decode.noAdapter") };
  return Object.keys(CHOICES).filter((field) => names[field]?.length > (none[field] ? 0 : 1)).map((field) => html`<label key=${field}>${t(`choice.${field}`)}
    ${" "}<select id="${prefix}-${field}" value=${now[field] ?? (none[field] ? "" : names[field][0])} onChange=${(event) => choose(field, event.currentTarget.value)}>
      ${none[field] && html`<option value="" selected=${!now[field]}>${none[field]}</option>`}
      ${names[field].map((name) => html`<option value=${name} selected=${name === now[field]}>${name}</option>`)}</select></label>`);
}

/** The parameters, collapsed by default. */
export function DecodeParameters({ prefix }) {
  useLanguage();
  const fields = useStore(described);
  const changed = Object.keys(useStore(values)).length;
  useEffect(() => {
    if (!Object.keys(described.get()).length) describe().catch(() => {});
  }, []);
  return html`<details class="parameters">
    <summary>${t("decode.title")}${changed ? ` (${t("decode.changed", { count: changed })})` : ""}</summary>
    <p class="row" role="group" aria-label=${t("decode.presets")}>${Object.keys(PRESETS).map((preset) => html`<button onClick=${() => usePreset(preset)}>${t(`preset.${preset}`)}</button>`)}</p>
    <div class="grid">${Object.entries(fields).map(([name, field]) => html`<${Parameter} key=${name} ...${{ name, field, prefix }} />`)}</div>
    <button onClick=${() => values.set({})} disabled=${!changed}>${t("decode.reset")}</button>
  </details>`;
}
