// What heads cost: what few bits would lose, what a plan does to each head, and what all of it saves.

import { el, section, choice, press, grid, number, signed } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./book.js";
import { ramp } from "./colour.js";

const PARTS = { qk: "W_Q and W_K", vo: "W_V and W_O", keys: "cached keys", values: "cached values" };
const DONE = "what is done";

export async function plan(root) {
  const sights = looks(), shown = sights.has(state.price) ? state.price : [...sights.keys()][0];
  root.append(
    el("div", { class: "tools" }, choice("colour", [...sights.keys()].map((name) => [name, name]), shown, (price) => change({ price }))),
    el("div", { class: "stack" }, section("Every head", board(sights.get(shown), shown), priceLegend(sights.get(shown), shown)), altogether(), costliest()));
}

// What can be shown of every head: a number and how it is written, or what is done to it in signs.
function looks() {
  const made = new Map(), heads = store.book.heads;
  if (heads.some(({ price }) => price && (price.cut || fewBits(price) || price.cache?.less))) made.set(DONE, { of: ({ price }) => (price ? treated(price) : null) });
  for (const { part, bits } of heads.find(({ price }) => price?.costs.length)?.price.costs ?? [])
    made.set(`${part} at ${bits} bits`, { of: ({ price }) => price.costs.find((one) => one.part === part && one.bits === bits)?.more ?? null, unit: `loss gained, ${store.book.plan.metric}` });
  if (heads.some(({ price }) => Number.isFinite(price?.cache?.score))) made.set("score of its cache", { of: ({ price }) => price.cache?.score ?? null, unit: store.book.plan.score });
  if (made.size === 0) made.set(DONE, { of: ({ price }) => (price ? treated(price) : null) });
  return made;
}

export const fewBits = ({ bits }) => bits !== null && (bits.qk < 32 || bits.vo < 32);

function treated(price) {
  if (price.cut) return { sign: "✕", kind: "cut" };
  const bits = fewBits(price) ? (price.bits.qk === price.bits.vo ? `${price.bits.qk}` : `${price.bits.qk}·${price.bits.vo}`) : "";
  const cache = price.cache?.streams ? "≋" : price.cache?.less ? `k${price.cache.bits}` : "";
  return { sign: [bits, cache].filter(Boolean).join(" ") || "·", kind: price.cache?.less ? "less" : bits ? "few" : "kept" };
}

// Layers downwards, heads from left to right; a cell opens the head's card.
function board(sight, name) {
  const values = store.book.heads.map(sight.of).filter(Number.isFinite), most = Math.max(1e-12, ...values.map(Math.abs)), colours = ramp();
  const widest = Math.max(1, ...store.book.heads.map((head) => head.head + 1));
  const rows = store.book.model.layers.map((layer) => el("div", { class: "prices", role: "row", style: { "--wide": widest } }, el("span", { class: "name", role: "rowheader" }, layer.address),
    layer.heads.map((address) => cell(store.heads.get(address), sight, most, colours))));
  return el("div", {}, el("p", { class: "axis-name", "aria-hidden": "true" }, "↓ layer, → head"), el("div", { class: "scroll tall", role: "grid", "aria-label": `${name}, every head` }, rows));
}

function cell(head, sight, most, colours) {
  const value = sight.of(head), open = () => change({ view: "card", head: head.address });
  const about = { type: "button", role: "gridcell", "data-head": head.address, "data-key": `price ${head.address}`, style: { "grid-column": head.head + 2 }, onclick: open };
  if (value === null) return el("button", { ...about, class: "price", "aria-label": `head ${head.address}: not known` }, "–");
  if (typeof value === "object") return el("button", { ...about, class: `price ${value.kind}`, "aria-label": `head ${head.address}: ${words(head.price)}` }, value.sign);
  const [r, g, b] = colours[Math.round(Math.sqrt(Math.max(0, value) / most) * 255)], light = 0.3 * r + 0.59 * g + 0.11 * b > 140;
  return el("button", { ...about, class: "price", "data-value": value, "aria-label": `head ${head.address}: ${number(value, 4)}`,
    style: { ...about.style, background: `rgb(${r} ${g} ${b})`, color: light ? "#10131a" : "#ffffff" } }, short(value));
}

// Three digits that count, without the zero before the point.
function short(value) {
  const told = Math.abs(value) >= 0.1 ? value.toFixed(2) : value.toFixed(3);
  return Number(told) === 0 ? "0" : told.replace("0.", ".");
}

export function words({ cut, bits, cache, shares }) {
  if (cut) return "cut";
  const told = [bits && (bits.qk < 32 || bits.vo < 32) && `weights at ${bits.qk} and ${bits.vo} bits (Q/K, V/O)`, cache?.less && `its cache keeps ${cache.keeps}`].filter(Boolean);
  return `${told.join("; ") || "kept as it is"}${shares.length ? `; shares keys with ${shares.join(", ")}` : ""}`;
}

function priceLegend(sight, name) {
  if (name !== DONE) return el("p", { class: "note" }, `${sight.unit}; darker, or in the dark brighter, is more. Heads that share keys are asked about together and share the number.`);
  const some = (test) => store.book.heads.some(({ price }) => price && test(price));
  const signs = [some(({ cut }) => cut) && ["✕", "cut"], some(fewBits) && ["4·3", "bits of W_Q and W_K, of W_V and W_O"],
    some(({ cache }) => cache?.streams) && ["≋", "its key head streams: a few first tokens and the last ones"],
    some(({ cache }) => cache?.less && !cache.streams) && ["k8", "its keys and values are kept at so many bits"], ["·", "kept as it is"]].filter(Boolean);
  return el("dl", { class: "facts legend" }, signs.flatMap(([sign, told]) => [el("dt", {}, sign), el("dd", {}, told)]));
}

const megabytes = (bytes) => `${number(bytes / 1e6, 1)} MB`;

function altogether() {
  const { plan: told } = store.book, [before, after] = told.weights, [held, holds] = told.cache;
  const facts = [["weights", before === after ? megabytes(after) : `${megabytes(before)} → ${megabytes(after)}`],
    told.whole > 0 && [`a cache of ${number(told.length)} tokens`, `${held === told.whole && holds === held ? megabytes(holds) : `${megabytes(told.whole)} → ${megabytes(holds)}, ${number(told.whole / Math.max(1, holds), 2)}× fewer`}`],
    told.texts > 0 && ["costs measured on", `${number(told.texts)} texts, weights in the ${told.basis} basis`]].filter(Boolean);
  return section(told.given ? "What the plan does" : "What it takes", el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    told.told.length > 0 && el("pre", { class: "told" }, told.told.join("\n")));
}

function costliest() {
  const seen = new Map();
  for (const { address, price } of store.book.heads) for (const one of price?.costs ?? []) {
    const key = `${[address, ...price.shares].sort()} ${one.part} ${one.bits}`; // heads that share keys are one row
    if (!seen.has(key)) seen.set(key, { ...one, heads: [address, ...price.shares] });
  }
  if (seen.size === 0) return null;
  const rows = [...seen.values()].sort((a, b) => b.drift - a.drift).slice(0, 16);
  return section("What few bits cost", grid(`The ${rows.length} that drift furthest of ${seen.size}; loss in ${store.book.plan.metric}`, ["heads", "part", "bits", "loss gained", "95 %", "drift"],
    rows.map((one) => [el("span", {}, one.heads.map((head) => press(head, () => change({ view: "card", head }), { class: "small", "data-key": `cost ${head} ${one.part} ${one.bits}` }))), PARTS[one.part], one.bits,
      signed(one.more, 4), `${number(one.low, 4)} to ${number(one.high, 4)}`, [one.drift, 4]]), { "data-table": "costs" }));
}

// The price on a head's card; nothing where the book tells none.
export function price(head) {
  if (!head.price) return null;
  const { costs, cache } = head.price, told = store.book.plan;
  if (!costs.length && !cache) return null;
  const facts = [["now", words(head.price)],
    cache && ["its cache", `key head ${cache.key}: ${number(cache.bytes / 1000, 0)} kB of ${number(cache.whole / 1000, 0)} at 4,096 tokens`],
    cache && Number.isFinite(cache.score) && ["score of its cache", `${number(cache.score, "short")}, ${told.score}`]].filter(Boolean);
  return section("Its price", el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    costs.length > 0 && grid(`What few bits cost, ${told.metric}${head.price.shares.length ? `, with ${head.price.shares.join(", ")}` : ""}`, ["part", "bits", "loss gained", "95 %", "drift"],
      costs.map((one) => [PARTS[one.part], one.bits, signed(one.more, 4), `${number(one.low, 4)} to ${number(one.high, 4)}`, [one.drift, 4]]), { "data-table": "price" }));
}
