// Charts: lines with intervals, weights by distance, bars. Each has its numbers beside it as a table.

import { el, svg, grid, number, signed } from "./dom.js";
import { CHOSEN } from "./colour.js";

const WIDE = 600, HIGH = 260, LEFT = 52, BELOW = 40, ABOVE = 12, RIGHT = 14;

// { title, x, y, base, series: [{ name, points: [[x, y, low, high]] }] }
export function lineChart(given) {
  const points = given.series.flatMap((one) => one.points).filter((point) => Number.isFinite(point[1]));
  if (points.length === 0) return el("p", { class: "note" }, `${given.title}: no numbers`);
  const xs = range(points.map((point) => point[0]));
  const ys = range([...points.flatMap((point) => point.slice(1)).filter(Number.isFinite), ...(Number.isFinite(given.base) ? [given.base] : [])]);
  const across = (x) => LEFT + ((x - xs[0]) / (xs[1] - xs[0])) * (WIDE - LEFT - RIGHT);
  const up = (y) => HIGH - BELOW - ((y - ys[0]) / (ys[1] - ys[0])) * (HIGH - BELOW - ABOVE);
  const made = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "plot", role: "img", "aria-label": `${given.title}: ${given.y} by ${given.x}` });
  for (const y of ticks(ys)) made.append(
    svg("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: up(y), y2: up(y) }),
    svg("text", { class: "soft", x: LEFT - 6, y: up(y) + 4, "text-anchor": "end" }, number(y, digits(ys))));
  for (const x of ticks(xs)) made.append(svg("text", { class: "soft", x: across(x), y: HIGH - BELOW + 16, "text-anchor": "middle" }, number(x, digits(xs))));
  made.append(svg("text", { class: "soft", x: (WIDE + LEFT) / 2, y: HIGH - 6, "text-anchor": "middle" }, given.x));
  if (Number.isFinite(given.base)) made.append(svg("line", { x1: LEFT, x2: WIDE - RIGHT, y1: up(given.base), y2: up(given.base), stroke: "currentColor", "stroke-dasharray": "4 4" }));
  given.series.forEach((one, place) => made.append(...curve(one.points, CHOSEN[place % CHOSEN.length], across, up)));
  const names = given.series.map((one, place) => el("span", { class: "chip", style: { "--chip": CHOSEN[place % CHOSEN.length] } }, one.name));
  return el("figure", {}, el("figcaption", {}, given.y), made, el("div", { class: "chips" }, names),
    el("details", {}, el("summary", {}, "The numbers"),
      grid(given.title, ["", given.x, given.y, "low", "high"], given.series.flatMap((one) => one.points.map((point) => [one.name, ...[0, 1, 2, 3].map((i) => [point[i] ?? null, 3])])))));
}

function curve(points, colour, across, up) {
  const there = points.filter((point) => Number.isFinite(point[1])).sort((a, b) => a[0] - b[0]);
  const line = there.map((point, i) => `${i ? "L" : "M"}${across(point[0])} ${up(point[1])}`).join("");
  const banded = there.filter((point) => Number.isFinite(point[2]) && Number.isFinite(point[3]));
  const made = [svg("path", { d: line, fill: "none", stroke: colour, "stroke-width": 2 })];
  if (banded.length > 1) {
    const edge = [...banded.map((point) => [point[0], point[3]]), ...banded.map((point) => [point[0], point[2]]).reverse()];
    made.unshift(svg("path", { d: `${edge.map(([x, y], i) => `${i ? "L" : "M"}${across(x)} ${up(y)}`).join("")}Z`, fill: colour, opacity: 0.15 }));
  }
  if (there.length <= 40) made.push(...there.map((point) => svg("circle", { cx: across(point[0]), cy: up(point[1]), r: 3, fill: colour })));
  return made;
}

// Mean weight at each distance, oneself at 0; a second head beside the first.
export function offsetChart(offsets, others = null) {
  const high = 120, wide = 420, all = [...offsets, ...(others ?? [])];
  const top = Math.max(0.05, ...all.map(([, weight]) => weight ?? 0)), step = (wide - 40) / Math.max(1, offsets.length);
  const made = svg("svg", { viewBox: `0 0 ${wide} ${high + 34}`, class: "plot", role: "img", "aria-label": `Mean weight by distance, at most ${number(top, 2)}` });
  made.append(svg("line", { class: "axis", x1: 36, x2: wide, y1: high, y2: high }),
    svg("text", { class: "soft", x: 32, y: 14, "text-anchor": "end" }, number(top, 2)), svg("text", { class: "soft", x: 32, y: high, "text-anchor": "end" }, "0"));
  const paint = (some, colour, part, parts) => some.forEach(([offset, weight]) => {
    const place = offsets.findIndex(([one]) => one === offset), tall = ((weight ?? 0) / top) * (high - 8);
    if (place < 0) return;
    made.append(svg("rect", { x: 38 + place * step + (part * step) / parts, y: high - tall, width: Math.max(0.8, step / parts - 0.6), height: tall, fill: colour },
      svg("title", {}, `${distanceName(offset)}: ${number(weight, 3)}`)));
  });
  paint(offsets, CHOSEN[0], 0, others ? 2 : 1);
  if (others) paint(others, CHOSEN[1], 1, 2);
  offsets.forEach(([offset], place) => {
    if (offset === 0 || Math.abs(offset) % 8 === 0 || Math.abs(offset) === 1 && offsets.length < 34)
      made.append(svg("text", { class: "soft", x: 38 + (place + 0.5) * step, y: high + 14, "text-anchor": "middle" }, String(Math.abs(offset))));
  });
  const ahead = offsets.some(([offset]) => offset < 0);
  made.append(svg("text", { class: "soft", x: 38, y: high + 30 }, "tokens back"));
  if (ahead) made.append(svg("text", { class: "soft", x: wide, y: high + 30, "text-anchor": "end" }, "tokens ahead"));
  return made;
}

function distanceName(offset) {
  return offset === 0 ? "oneself" : offset > 0 ? `${offset} back` : `${-offset} ahead`;
}

// Bars for and against: [label, value].
export function barList(rows, digits_ = 2, plain = false) {
  const top = Math.max(1e-9, ...rows.map(([, value]) => Math.abs(value)));
  return el("div", { class: "bars" }, rows.flatMap(([label, value]) => [
    label instanceof Node ? label : el("code", {}, label),
    el("span", { class: value < 0 ? "bar minus" : "bar", style: { width: `${(100 * Math.abs(value)) / top}%` } }),
    el("span", { class: "number", "data-value": value }, plain ? number(value, digits_) : signed(value, digits_)),
  ]));
}

function range(values) {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function ticks([low, high]) {
  const rough = (high - low) / 5, size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((one) => one * size >= rough);
  const made = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) made.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return made;
}

function digits([low, high]) {
  return high - low > 20 ? 0 : high - low > 1 ? 1 : high - low > 0.1 ? 2 : 3;
}
