import { html } from "../ui.js";
export const Batch = () => html`<p></p>`;
