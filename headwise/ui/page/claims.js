// Claims about attention heads, each with the result of its test, a plot and the command that reproduces it.

import { el, section, press, grid, number, brief } from "./dom.js";
import { state, change, writeHash } from "./state.js";
import { store } from "./report.js";
import { linePlot, intervalBars } from "./chart.js";

const VERDICTS = {
  holds: { sign: "✓", color: "var(--good)", some: "hold", one: "holds" },
  "does not hold": { sign: "✗", color: "var(--bad)", some: "do not hold", one: "does not hold" },
  depends: { sign: "◐", color: "var(--focus)", some: "depend on conditions", one: "depends on conditions" },
  undecided: { sign: "?", color: "var(--soft)", some: "are undecided", one: "is undecided" },
  "true by construction": { sign: "≡", color: "var(--accent)", some: "are true by construction", one: "is true by construction" },
};
const unfolded = new Set(); // claims whose table is open; it stays open after a redraw
let reached = ""; // the claim scrolled to last

export async function claims(root) {
  const wanted = Object.hasOwn(VERDICTS, state.verdict) ? state.verdict : "";
  const shown = store.report.claims.filter((one) => !wanted || one.verdict === wanted);
  root.append(el("div", { class: "stack" },
    section(`${counted(store.report.claims.length, "claim")} tested`, summary(wanted), contents(shown)), shown.map(tested)));
  if (state.claim !== reached) goTo(state.claim);
}

// Number of claims per verdict, and a filter button for each.
function summary(wanted) {
  const count = (verdict) => store.report.claims.filter((one) => one.verdict === verdict).length;
  const there = Object.keys(VERDICTS).filter((verdict, place) => place < 3 || count(verdict) > 0);
  const words = there.map((verdict) => `${count(verdict)} ${VERDICTS[verdict][count(verdict) === 1 ? "one" : "some"]}`);
  const choose = (verdict, label) => el("button", { type: "button", "data-key": `verdict ${verdict}`, "aria-pressed": String(wanted === verdict),
    onclick: () => change({ verdict }) }, label);
  return [
    el("p", { class: "big", "data-fact": "summary" }, `${words.join(", ")}.`),
    store.report.claims.some((one) => one.preliminary) && el("p", { class: "note" }, "Indicative: fewer than three seeds, or fewer than planned, so the result is preliminary."),
    store.report.claims.some((one) => one.verdict === "true by construction") && el("p", { class: "note" }, "True by construction: follows from the definition of a layer. The measurement tests the code and is not evidence."),
    store.report.claims.some((one) => one.exploratory) && el("p", { class: "note" }, "Exploratory: the decision rules were written with knowledge of these seeds."),
    el("div", { class: "chips tools", role: "group", "aria-label": "Show by verdict" }, choose("", `all ${store.report.claims.length}`),
      there.map((verdict) => choose(verdict, [chip(verdict), ` ${count(verdict)}`]))),
  ];
}

function contents(shown) {
  if (shown.length === 0) return el("p", { class: "note" }, "No claim has this verdict.");
  const link = (one) => el("a", { href: `#${writeHash({ ...state, view: "claims", claim: one.name })}`, "data-key": `to ${one.name}`,
    onclick: (event) => { event.preventDefault(); reached = ""; change({ claim: one.name }); } }, brief(one.statement, 110));
  return el("div", { class: "contents" }, grid("Contents", ["", "claim", "verdict"],
    shown.map((one) => [String(one.number), link(one), el("span", { class: "chips" }, chip(one.verdict), one.preliminary && el("small", {}, "indicative"))]), { "data-table": "claims" }));
}

// A verdict: color, symbol and word.
function chip(verdict) {
  const { sign, color } = VERDICTS[verdict];
  return el("span", { class: "chip verdict", style: { "--chip": color } }, el("span", { "aria-hidden": "true" }, sign), verdict);
}

function tested(one) {
  const facts = [["counterevidence", one.counterevidence], ["setup", one.setup], ["decision rule", one.rule],
    ["true by construction", one.identity], ["seeds", one.seeds.join(", ")], ["model", one.model], ["reproduce", el("code", { class: "command" }, one.command)]];
  return el("section", { id: `claim-${one.name}`, class: one.name === state.claim ? "claim here" : "claim", "aria-label": one.statement },
    el("h2", { tabindex: "-1" }, `${one.number}. ${one.statement}`),
    el("p", { class: "chips", "data-fact": "verdict" }, chip(one.verdict), one.depends_on && el("strong", {}, one.depends_on), one.preliminary && el("small", {}, `indicative: ${counted(one.seeds.length, "seed")}`)),
    el("div", { class: "pair" },
      el("dl", { class: "facts" }, facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      plotOf(one)),
    figures(one),
    press("↑ contents", () => { change({ claim: "" }); goTo("", one.name); }, { class: "small", "data-key": `from ${one.name}` }));
}

function plotOf({ statement, plot }) {
  if (plot.series) return linePlot({ ...plot, title: statement });
  return plot.bars.length > 0 && intervalBars({ ...plot, title: statement });
}

// Table of all statistics, plotted or not.
function figures(one) {
  const short = (value) => [value, "short"], many = one.statistics.some((row) => row.values.length > 1);
  const rows = one.statistics.map((row) => [row.name, row.condition === null ? "" : String(row.condition), short(row.mean), short(row.low), short(row.high),
    ...(many ? [row.values.map((value) => number(value, "short")).join(" · ")] : [])]);
  return el("details", { open: unfolded.has(one.name), ontoggle: (event) => { unfolded[event.target.open ? "add" : "delete"](one.name); } },
    el("summary", { "data-key": `figures ${one.name}` }, counted(rows.length, "statistic")),
    grid(`Statistics of ${one.name}; low and high: ${one.interval_note}`, ["statistic", "condition", "mean", "low", "high", ...(many ? ["each seed"] : [])], rows, { "data-table": one.name }));
}

// After drawing, scroll to a claim and focus it; without a name, go to the contents, at the claim in `from`.
function goTo(name, from = "") {
  reached = name;
  requestAnimationFrame(() => {
    const heading = document.getElementById(`claim-${name}`)?.querySelector("h2");
    if (name === "") globalThis.scrollTo(0, 0);
    heading?.closest("section").scrollIntoView();
    heading?.focus({ preventScroll: true });
    if (from) document.querySelector(`[data-key="${CSS.escape(`to ${from}`)}"]`)?.focus();
  });
}

// "1 claim", "25 claims".
export function counted(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}
