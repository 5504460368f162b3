import { html } from "../ui.js";
export const Translate = () => html`<p></p>`;
