// Trade-off curves: loss against pruned heads for each ranking method, and other curves of the report.

import { el, section } from "./dom.js";
import { store } from "./report.js";
import { lineChart } from "./chart.js";

export async function curves(root) {
  root.append(el("div", { class: "pair" }, store.report.curves.map((one) => section(one.title, lineChart(one)))));
}
