// Charts: lines with intervals, attention by distance, bars. Each also shows its numbers as a table.

import { el, svg, grid, number, signed } from "./dom.js";
import { CHOSEN } from "./color.js";

const WIDE = 600, HIGH = 260, LEFT = 52, BELOW = 40, ABOVE = 12, RIGHT = 14;

// { title, x, y, base, log, series: [{ name, points: [[x, y, low, high]] }] }; `log`: base-2 log scale of the x axis.
export function lineChart(given) {
  const drawn = linePlot(given);
  if (drawn.matches("figure")) drawn.append(el("details", {}, el("summary", {}, "Data"),
    grid(given.title, ["", given.x, given.y, "low", "high"], given.series.flatMap((one) => one.points.map((point) => [one.name, ...[0, 1, 2, 3].map((i) => [point[i] ?? null, 3])])))));
  return drawn;
}

// A line chart without the table.
export function linePlot(given) {
  const points = given.series.flatMap((one) => one.points).filter((point) => Number.isFinite(point[1]));
  if (points.length === 0) return el("p", { class: "note" }, `${given.title}: no data`);
  const place = given.log ? Math.log2 : Number, xs = range(points.map((point) => place(point[0])));
  const ys = range([...points.flatMap((point) => point.slice(1)).filter(Number.isFinite), ...(Number.isFinite(given.base) ? [given.base] : [])]);
  const across = (x) => LEFT + ((place(x) - xs[0]) / (xs[1] - xs[0])) * (WIDE - LEFT - RIGHT);
  const up = (y) => HIGH - BELOW - ((y - ys[0]) / (ys[1] - ys[0])) * (HIGH - BELOW - ABOVE);
  const made = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "plot", role: "img", "aria-label": `${given.title}: ${given.y} by ${given.x}` });
  for (const y of ticks(ys)) made.append(
    svg("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: up(y), y2: up(y) }),
    svg("text", { class: "soft", x: LEFT - 6, y: up(y) + 4, "text-anchor": "end" }, number(y, digits(ys))));
  for (const x of given.log ? doublings(points) : ticks(xs)) made.append(svg("text", { class: "soft", x: across(x), y: HIGH - BELOW + 16, "text-anchor": "middle" }, number(x, given.log ? "short" : digits(xs))));
  made.append(svg("text", { class: "soft", x: (WIDE + LEFT) / 2, y: HIGH - 6, "text-anchor": "middle" }, given.log ? `${given.x} (log scale)` : given.x));
  if (Number.isFinite(given.base)) made.append(svg("line", { x1: LEFT, x2: WIDE - RIGHT, y1: up(given.base), y2: up(given.base), stroke: "currentColor", "stroke-dasharray": "4 4" }));
  given.series.forEach((one, i) => made.append(...curve(one.points, CHOSEN[i % CHOSEN.length], across, up)));
  const names = given.series.map((one, i) => el("span", { class: "chip", style: { "--chip": CHOSEN[i % CHOSEN.length] } }, one.name));
  return el("figure", {}, el("figcaption", {}, given.y), made, el("div", { class: "chips" }, names));
}

function curve(points, color, across, up) {
  const there = points.filter((point) => Number.isFinite(point[1])).sort((a, b) => a[0] - b[0]);
  const line = there.map((point, i) => `${i ? "L" : "M"}${across(point[0])} ${up(point[1])}`).join("");
  const banded = there.filter((point) => Number.isFinite(point[2]) && Number.isFinite(point[3]));
  const made = [svg("path", { d: line, fill: "none", stroke: color, "stroke-width": 2 })];
  if (banded.length > 1) {
    const edge = [...banded.map((point) => [point[0], point[3]]), ...banded.map((point) => [point[0], point[2]]).reverse()];
    made.unshift(svg("path", { d: `${edge.map(([x, y], i) => `${i ? "L" : "M"}${across(x)} ${up(y)}`).join("")}Z`, fill: color, opacity: 0.15 }));
  }
  if (banded.length === 1) made.push(...banded.map(([x, , low, high]) => svg("line", { x1: across(x), x2: across(x), y1: up(low), y2: up(high), stroke: color })));
  if (there.length <= 40) made.push(...there.map((point) => svg("circle", { cx: across(point[0]), cy: up(point[1]), r: 3, fill: color })));
  return made;
}

// Mean attention weight at each distance (0 is the token itself), for one head or two.
export function offsetChart(offsets, others = null) {
  const high = 120, wide = 420, all = [...offsets, ...(others ?? [])];
  const top = Math.max(0.05, ...all.map(([, weight]) => weight ?? 0)), step = (wide - 40) / Math.max(1, offsets.length);
  const made = svg("svg", { viewBox: `0 0 ${wide} ${high + 34}`, class: "plot", role: "img", "aria-label": `Mean attention weight by distance, maximum ${number(top, 2)}` });
  made.append(svg("line", { class: "axis", x1: 36, x2: wide, y1: high, y2: high }),
    svg("text", { class: "soft", x: 32, y: 14, "text-anchor": "end" }, number(top, 2)), svg("text", { class: "soft", x: 32, y: high, "text-anchor": "end" }, "0"));
  const paint = (some, color, part, parts) => some.forEach(([offset, weight]) => {
    const place = offsets.findIndex(([one]) => one === offset), tall = ((weight ?? 0) / top) * (high - 8);
    if (place < 0) return;
    made.append(svg("rect", { x: 38 + place * step + (part * step) / parts, y: high - tall, width: Math.max(0.8, step / parts - 0.6), height: tall, fill: color },
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
  return offset === 0 ? "self" : offset > 0 ? `${offset} back` : `${-offset} ahead`;
}

// Bars of positive and negative values: [label, value].
export function barList(rows, digits_ = 2, plain = false) {
  const top = Math.max(1e-9, ...rows.map(([, value]) => Math.abs(value)));
  return el("div", { class: "bars" }, rows.flatMap(([label, value]) => [
    label instanceof Node ? label : el("code", {}, label),
    el("span", { class: value < 0 ? "bar minus" : "bar", style: { width: `${(100 * Math.abs(value)) / top}%` } }),
    el("span", { class: "number", "data-value": value }, plain ? number(value, digits_) : signed(value, digits_)),
  ]));
}

// { title, y, bars: [{ name, rows: [[label, value, low, high]] }] }: a bar from zero for each value, with its interval.
// Values that are close together and far from zero are dots on their own scale, because bar lengths would look equal.
export function intervalBars(given) {
  const all = given.bars.flatMap((one) => one.rows).flatMap((row) => row.slice(1)).filter(Number.isFinite);
  const low = Math.min(...all), high = Math.max(...all), dots = low > 0 && high - low < 0.3 * high;
  const [left, right] = dots ? range([low, high]) : [Math.min(0, low), Math.max(0, high) || 1];
  const share = (value) => (100 * (value - left)) / (right - left);
  const line = (kind, from, to, color) => el("span", { class: kind, style: { left: `${share(from)}%`, width: `${share(to) - share(from)}%`, "--chip": color } });
  const rows = given.bars.flatMap(({ name, rows }, i) => [
    (rows.length > 1 || rows[0][0] !== name) && given.bars.length > 1 && el("h3", {}, name),
    ...rows.flatMap(([label, value, from, to]) => [el("span", {}, label),
      el("span", { class: "track" }, !dots && line("zero", 0, 0, ""),
        Number.isFinite(value) && (dots ? line("dot", value, value, CHOSEN[i % CHOSEN.length]) : line("fill", Math.min(0, value), Math.max(0, value), CHOSEN[i % CHOSEN.length])),
        Number.isFinite(from) && Number.isFinite(to) && line("whisker", from, to, "")),
      el("span", { class: "number", "data-value": value }, number(value, "short"))]),
  ]);
  const scale = el("span", { class: "scale", "aria-hidden": "true" }, [left, right].map((end) => el("span", {}, number(Number(end.toPrecision(3)), "short"))));
  return el("figure", {}, el("figcaption", {}, [given.y, given.x && `by ${given.x}`].filter(Boolean).join(" ")), el("div", { class: "bars intervals", role: "group", "aria-label": given.title }, rows, el("span", {}, ""), scale));
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

// Ticks at powers of two, at most ten; if there are fewer than two, at the points themselves.
function doublings(points) {
  const own = [...new Set(points.map((point) => point[0]))].sort((a, b) => a - b);
  const first = Math.ceil(Math.log2(own[0])), last = Math.floor(Math.log2(own.at(-1))), step = Math.ceil((last - first + 1) / 10);
  const made = [];
  for (let at = first; at <= last; at += step) made.push(2 ** at);
  return made.length > 1 ? made : own.slice(0, 10);
}

function digits([low, high]) {
  return high - low > 20 ? 0 : high - low > 1 ? 1 : high - low > 0.1 ? 2 : high - low > 0.01 ? 3 : "short";
}
