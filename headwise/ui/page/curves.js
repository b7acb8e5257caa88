// Trade-offs: what is lost when heads are cut, by every way to choose them, and whatever other curves the report brings.

import { el, section } from "./dom.js";
import { store } from "./report.js";
import { lineChart } from "./chart.js";

export async function curves(root) {
  root.append(el("div", { class: "pair" }, store.report.curves.map((one) => section(one.title, lineChart(one)))));
}
