// What heads cost: what few bits would lose, what a plan does to each head, and what all of it saves.

import { el, section, choice, press, grid, number, signed } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./report.js";
import { ramp } from "./color.js";

const PARTS = { qk: "W_Q and W_K", vo: "W_V and W_O", keys: "cached keys", values: "cached values" };
const DONE = "what is done";

export async function plan(root) {
  const sights = looks(), shown = sights.has(state.cost) ? state.cost : [...sights.keys()][0];
  root.append(
    el("div", { class: "tools" }, choice("color", [...sights.keys()].map((name) => [name, name]), shown, (chosen) => change({ cost: chosen }))),
    el("div", { class: "stack" }, section("Every head", board(sights.get(shown), shown), costLegend(sights.get(shown), shown)), altogether(), costliest()));
}

// What can be shown of every head: a number and how it is written, or what is done to it in signs.
function looks() {
  const made = new Map(), heads = store.report.heads;
  if (heads.some(({ cost }) => cost && (cost.pruned || fewBits(cost) || cost.cache?.reduced))) made.set(DONE, { of: ({ cost }) => (cost ? treated(cost) : null) });
  for (const { part, bits } of heads.find(({ cost }) => cost?.costs.length)?.cost.costs ?? [])
    made.set(`${part} at ${bits} bits`, { of: ({ cost }) => cost.costs.find((one) => one.part === part && one.bits === bits)?.loss_increase ?? null, unit: `loss gained, ${store.report.plan.metric}` });
  if (heads.some(({ cost }) => Number.isFinite(cost?.cache?.score))) made.set("score of its cache", { of: ({ cost }) => cost.cache?.score ?? null, unit: store.report.plan.score_description });
  if (made.size === 0) made.set(DONE, { of: ({ cost }) => (cost ? treated(cost) : null) });
  return made;
}

export const fewBits = ({ bits }) => bits !== null && (bits.qk < 32 || bits.vo < 32);

function treated(cost) {
  if (cost.pruned) return { sign: "✕", kind: "pruned" };
  const bits = fewBits(cost) ? (cost.bits.qk === cost.bits.vo ? `${cost.bits.qk}` : `${cost.bits.qk}·${cost.bits.vo}`) : "";
  const cache = cost.cache?.streaming ? "≋" : cost.cache?.reduced ? `k${cost.cache.bits}` : "";
  return { sign: [bits, cache].filter(Boolean).join(" ") || "·", kind: cost.cache?.reduced ? "less" : bits ? "few" : "kept" };
}

// Layers downwards, heads from left to right; a cell opens the head's card.
function board(sight, name) {
  const values = store.report.heads.map(sight.of).filter(Number.isFinite), most = Math.max(1e-12, ...values.map(Math.abs)), colors = ramp();
  const widest = Math.max(1, ...store.report.heads.map((head) => head.head + 1));
  const rows = store.report.model.layers.map((layer) => el("div", { class: "costs", role: "row", style: { "--wide": widest } }, el("span", { class: "name", role: "rowheader" }, layer.address),
    layer.heads.map((address) => cell(store.heads.get(address), sight, most, colors))));
  return el("div", {}, el("p", { class: "axis-name", "aria-hidden": "true" }, "↓ layer, → head"), el("div", { class: "scroll tall", role: "grid", "aria-label": `${name}, every head` }, rows));
}

function cell(head, sight, most, colors) {
  const value = sight.of(head), open = () => change({ view: "card", head: head.address });
  const about = { type: "button", role: "gridcell", "data-head": head.address, "data-key": `cost ${head.address}`, style: { "grid-column": head.head + 2 }, onclick: open };
  if (value === null) return el("button", { ...about, class: "cost", "aria-label": `head ${head.address}: not known` }, "–");
  if (typeof value === "object") return el("button", { ...about, class: `cost ${value.kind}`, "aria-label": `head ${head.address}: ${describeCost(head.cost)}` }, value.sign);
  const [r, g, b] = colors[Math.round(Math.sqrt(Math.max(0, value) / most) * 255)], light = 0.3 * r + 0.59 * g + 0.11 * b > 140;
  return el("button", { ...about, class: "cost", "data-value": value, "aria-label": `head ${head.address}: ${number(value, 4)}`,
    style: { ...about.style, background: `rgb(${r} ${g} ${b})`, color: light ? "#10131a" : "#ffffff" } }, short(value));
}

// Three digits that count, without the zero before the point.
function short(value) {
  const told = Math.abs(value) >= 0.1 ? value.toFixed(2) : value.toFixed(3);
  return Number(told) === 0 ? "0" : told.replace("0.", ".");
}

export function describeCost({ pruned, bits, cache, kv_siblings: shares }) {
  if (pruned) return "cut";
  const told = [bits && (bits.qk < 32 || bits.vo < 32) && `weights at ${bits.qk} and ${bits.vo} bits (Q/K, V/O)`, cache?.reduced && `its cache keeps ${cache.policy}`].filter(Boolean);
  return `${told.join("; ") || "kept as it is"}${shares.length ? `; shares keys with ${shares.join(", ")}` : ""}`;
}

function costLegend(sight, name) {
  if (name !== DONE) return el("p", { class: "note" }, `${sight.unit}; darker, or in the dark brighter, is more. Heads that share keys are asked about together and share the number.`);
  const some = (test) => store.report.heads.some(({ cost }) => cost && test(cost));
  const signs = [some(({ pruned }) => pruned) && ["✕", "cut"], some(fewBits) && ["4·3", "bits of W_Q and W_K, of W_V and W_O"],
    some(({ cache }) => cache?.streaming) && ["≋", "its key head streams: a few first tokens and the last ones"],
    some(({ cache }) => cache?.reduced && !cache.streaming) && ["k8", "its keys and values are kept at so many bits"], ["·", "kept as it is"]].filter(Boolean);
  return el("dl", { class: "facts legend" }, signs.flatMap(([sign, told]) => [el("dt", {}, sign), el("dd", {}, told)]));
}

const megabytes = (bytes) => `${number(bytes / 1e6, 1)} MB`;

function altogether() {
  const { plan: told } = store.report, [before, after] = told.weights, [held, holds] = told.cache;
  const facts = [["weights", before === after ? megabytes(after) : `${megabytes(before)} → ${megabytes(after)}`],
    told.full_cache > 0 && [`a cache of ${number(told.tokens)} tokens`, `${held === told.full_cache && holds === held ? megabytes(holds) : `${megabytes(told.full_cache)} → ${megabytes(holds)}, ${number(told.full_cache / Math.max(1, holds), 2)}× fewer`}`],
    told.texts > 0 && ["costs measured on", `${number(told.texts)} texts, weights in the ${told.basis} basis`]].filter(Boolean);
  return section(told.has_plan ? "What the plan does" : "What it takes", el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    told.description.length > 0 && el("pre", { class: "description" }, told.description.join("\n")));
}

function costliest() {
  const seen = new Map();
  for (const { address, cost } of store.report.heads) for (const one of cost?.costs ?? []) {
    const key = `${[address, ...cost.kv_siblings].sort()} ${one.part} ${one.bits}`; // heads that share keys are one row
    if (!seen.has(key)) seen.set(key, { ...one, heads: [address, ...cost.kv_siblings] });
  }
  if (seen.size === 0) return null;
  const rows = [...seen.values()].sort((a, b) => b.kl_divergence - a.kl_divergence).slice(0, 16);
  return section("What few bits cost", grid(`The ${rows.length} that drift furthest of ${seen.size}; loss in ${store.report.plan.metric}`, ["heads", "part", "bits", "loss gained", "95 %", "drift"],
    rows.map((one) => [el("span", {}, one.heads.map((head) => press(head, () => change({ view: "card", head }), { class: "small", "data-key": `cost ${head} ${one.part} ${one.bits}` }))), PARTS[one.part], one.bits,
      signed(one.loss_increase, 4), `${number(one.low, 4)} to ${number(one.high, 4)}`, [one.kl_divergence, 4]]), { "data-table": "costs" }));
}

// The cost on a head's card; nothing where the report tells none.
export function costSection(head) {
  if (!head.cost) return null;
  const { costs, cache } = head.cost, told = store.report.plan;
  if (!costs.length && !cache) return null;
  const facts = [["now", describeCost(head.cost)],
    cache && ["its cache", `key head ${cache.kv_head}: ${number(cache.bytes / 1000, 0)} kB of ${number(cache.full_bytes / 1000, 0)} at 4,096 tokens`],
    cache && Number.isFinite(cache.score) && ["score of its cache", `${number(cache.score, "short")}, ${told.score_description}`]].filter(Boolean);
  return section("Its cost", el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    costs.length > 0 && grid(`What few bits cost, ${told.metric}${head.cost.kv_siblings.length ? `, with ${head.cost.kv_siblings.join(", ")}` : ""}`, ["part", "bits", "loss gained", "95 %", "drift"],
      costs.map((one) => [PARTS[one.part], one.bits, signed(one.loss_increase, 4), `${number(one.low, 4)} to ${number(one.high, 4)}`, [one.kl_divergence, 4]]), { "data-table": "cost" }));
}
