// Cost of heads: quantization cost, changes made by a plan, and the memory it saves.

import { el, section, choice, press, grid, number, signed } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./report.js";
import { ramp } from "./color.js";

const PARTS = { qk: "W_Q and W_K", vo: "W_V and W_O", keys: "cached keys", values: "cached values" };
const DONE = "changes";

export async function plan(root) {
  const sights = looks(), shown = sights.has(state.cost) ? state.cost : [...sights.keys()][0];
  root.append(
    el("div", { class: "tools" }, choice("color", [...sights.keys()].map((name) => [name, name]), shown, (chosen) => change({ cost: chosen }))),
    el("div", { class: "stack" }, section("All heads", board(sights.get(shown), shown), costLegend(sights.get(shown), shown)), altogether(), costliest()));
}

// Choices for the grid: a number with its unit, or the changes of a plan as symbols.
function looks() {
  const made = new Map(), heads = store.report.heads;
  if (heads.some(({ cost }) => cost && (cost.pruned || fewBits(cost) || cost.cache?.reduced))) made.set(DONE, { of: ({ cost }) => (cost ? treated(cost) : null) });
  for (const { part, bits } of heads.find(({ cost }) => cost?.costs.length)?.cost.costs ?? [])
    made.set(`${part} at ${bits} bits`, { of: ({ cost }) => cost.costs.find((one) => one.part === part && one.bits === bits)?.loss_increase ?? null, unit: `loss increase, ${store.report.plan.metric}` });
  if (heads.some(({ cost }) => Number.isFinite(cost?.cache?.score))) made.set("cache score", { of: ({ cost }) => cost.cache?.score ?? null, unit: store.report.plan.score_description });
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

// Grid of layers × heads; a cell opens the head.
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
  if (value === null) return el("button", { ...about, class: "cost", "aria-label": `head ${head.address}: unknown` }, "–");
  if (typeof value === "object") return el("button", { ...about, class: `cost ${value.kind}`, "aria-label": `head ${head.address}: ${describeCost(head.cost)}` }, value.sign);
  const [r, g, b] = colors[Math.round(Math.sqrt(Math.max(0, value) / most) * 255)], light = 0.3 * r + 0.59 * g + 0.11 * b > 140;
  return el("button", { ...about, class: "cost", "data-value": value, "aria-label": `head ${head.address}: ${number(value, 4)}`,
    style: { ...about.style, background: `rgb(${r} ${g} ${b})`, color: light ? "#10131a" : "#ffffff" } }, short(value));
}

// A cost with two or three decimals.
function short(value) {
  const text = Math.abs(value) >= 0.1 ? value.toFixed(2) : value.toFixed(3);
  return Number(text) === 0 ? "0" : text;
}

export function describeCost({ pruned, bits, cache, kv_siblings: shares }) {
  if (pruned) return "pruned";
  const changes = [bits && (bits.qk < 32 || bits.vo < 32) && `weights at ${bits.qk} and ${bits.vo} bits (Q/K, V/O)`, cache?.reduced && `cache: ${cache.policy}`].filter(Boolean);
  return `${changes.join("; ") || "unchanged"}${shares.length ? `; shares its KV head with ${shares.join(", ")}` : ""}`;
}

function costLegend(sight, name) {
  if (name !== DONE) return el("p", { class: "note" }, `${sight.unit}; darker (brighter in the dark theme) is more. Heads with the same KV head are measured together and share the number.`);
  const some = (test) => store.report.heads.some(({ cost }) => cost && test(cost));
  const signs = [some(({ pruned }) => pruned) && ["✕", "pruned"], some(fewBits) && ["4·3", "bits of W_Q and W_K, of W_V and W_O"],
    some(({ cache }) => cache?.streaming) && ["≋", "streaming KV head: caches sink tokens and a window"],
    some(({ cache }) => cache?.reduced && !cache.streaming) && ["k8", "bits of the cached keys and values"], ["·", "unchanged"]].filter(Boolean);
  return el("dl", { class: "facts legend" }, signs.flatMap(([sign, meaning]) => [el("dt", {}, sign), el("dd", {}, meaning)]));
}

const megabytes = (bytes) => `${number(bytes / 1e6, 1)} MB`;

function altogether() {
  const { plan: data } = store.report, [before, after] = data.weights, [held, holds] = data.cache;
  const facts = [["weights", before === after ? megabytes(after) : `${megabytes(before)} → ${megabytes(after)}`],
    data.full_cache > 0 && [`KV cache at ${number(data.tokens)} tokens`, `${held === data.full_cache && holds === held ? megabytes(holds) : `${megabytes(data.full_cache)} → ${megabytes(holds)}, ${number(data.full_cache / Math.max(1, holds), 2)}× smaller`}`],
    data.texts > 0 && ["costs measured on", `${number(data.texts)} texts, weights in the ${data.basis} basis`]].filter(Boolean);
  return section(data.has_plan ? "Changes by the plan" : "Memory", el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    data.description.length > 0 && el("pre", { class: "description" }, data.description.join("\n")));
}

function costliest() {
  const seen = new Map();
  for (const { address, cost } of store.report.heads) for (const one of cost?.costs ?? []) {
    const key = `${[address, ...cost.kv_siblings].sort()} ${one.part} ${one.bits}`; // heads with the same KV head are one row
    if (!seen.has(key)) seen.set(key, { ...one, heads: [address, ...cost.kv_siblings] });
  }
  if (seen.size === 0) return null;
  const rows = [...seen.values()].sort((a, b) => b.kl_divergence - a.kl_divergence).slice(0, 16);
  return section("Quantization cost", grid(`The ${rows.length} largest KL divergences of ${seen.size}; loss in ${store.report.plan.metric}`, ["heads", "part", "bits", "loss increase", "95% CI", "KL divergence"],
    rows.map((one) => [el("span", {}, one.heads.map((head) => press(head, () => change({ view: "card", head }), { class: "small", "data-key": `cost ${head} ${one.part} ${one.bits}` }))), PARTS[one.part], one.bits,
      signed(one.loss_increase, 4), `${number(one.low, 4)} to ${number(one.high, 4)}`, [one.kl_divergence, 4]]), { "data-table": "costs" }));
}

// The cost section of one head; null if the report has no costs.
export function costSection(head) {
  if (!head.cost) return null;
  const { costs, cache } = head.cost, data = store.report.plan;
  if (!costs.length && !cache) return null;
  const facts = [["state", describeCost(head.cost)],
    cache && ["KV cache", `KV head ${cache.kv_head}: ${number(cache.bytes / 1000, 0)} kB of ${number(cache.full_bytes / 1000, 0)} at 4,096 tokens`],
    cache && Number.isFinite(cache.score) && ["cache score", `${number(cache.score, "short")}, ${data.score_description}`]].filter(Boolean);
  return section("Cost", el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    costs.length > 0 && grid(`Quantization cost, ${data.metric}${head.cost.kv_siblings.length ? `, together with ${head.cost.kv_siblings.join(", ")}` : ""}`, ["part", "bits", "loss increase", "95% CI", "KL divergence"],
      costs.map((one) => [PARTS[one.part], one.bits, signed(one.loss_increase, 4), `${number(one.low, 4)} to ${number(one.high, 4)}`, [one.kl_divergence, 4]]), { "data-table": "cost" }));
}
