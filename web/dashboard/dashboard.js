import { html } from "../ui.js";
export const Dashboard = () => html`<p></p>`;
