// Data flow of one token through one layer: input, attention of each head, concatenated outputs, W_O. The width of a band is
// the share of the head in the output of the layer.

import { el, svg, section, choice, tools, grid, brief, number } from "./dom.js";
import { state, change } from "./state.js";
import { store, openSentence } from "./report.js";
import { CHOSEN, ink } from "./color.js";
import { paintMap } from "./heat.js";

export async function flow(root) {
  const sight = await openSentence(state.sentence);
  if (sight === null) return root.append(el("p", { class: "note" }, "The report has no sentence."));
  const layers = store.report.model.layers.filter((one) => one.heads.some((head) => sight.has(head)));
  const layer = layers.find((one) => one.address === (state.layer || state.head.split(".").slice(0, -1).join("."))) ?? layers[0];
  const token = state.token >= 0 && state.token < sight.n && state.level === "token" ? state.token : sight.special.lastIndexOf(false);
  const heads = layer.heads.filter((head) => sight.has(head));
  root.append(
    tools(
      choice("sentence", store.sentences.map((one, i) => [i, brief(one.given.text, 60)]), state.sentence, (place) => change({ sentence: Number(place), token: -1 })),
      choice("layer", layers.map((one) => [one.address, one.address]), layer.address, (address) => change({ layer: address })),
      choice("token", sight.tokens.map((label, i) => [i, `${i} ${label}`]), token, (i) => change({ token: Number(i), level: "token" }))),
    section(`“${sight.tokens[token]}” through layer ${layer.address}`, drawing(sight, heads, token),
      el("p", { class: "note" }, "Left to right: the vector of the token; the attention map of each head, with the row of the token framed and its most attended token; the concatenated head outputs; W_O, which mixes them into the output of the layer. Width: share of each head in the output, by norm."),
      el("details", {}, el("summary", {}, "Output shares as a table"),
        grid("Share of the layer output at this token", ["head", "role", "share", "most attended token"], heads.map((head) => [head, store.heads.get(head)?.role ?? "", [sight.share(head, token), 3], most(sight, head, token)])))));
}

function most(sight, head, token) {
  const row = sight.row(head, token), best = row.indexOf(Math.max(...row));
  return `${sight.tokens[best]} ${number(row[best], 2)}`;
}

function drawing(sight, heads, token) {
  const size = Math.max(26, Math.min(76, Math.floor(760 / heads.length))), gap = size < 40 ? 5 : 12, line = size + gap;
  const high = heads.length * line + 30, middle = high / 2 - 10;
  const map = 250, out = 560, blend = 700, end = 850, wide = 960;
  const total = heads.reduce((sum, head) => sum + sight.share(head, token), 0) || 1, thick = Math.min(170, high - 60);
  const box = el("div", { class: "flow", style: { height: `${high}px`, "min-width": "0" } });
  const pen = svg("svg", { width: wide, height: high, role: "img", "aria-label": `One token in ${heads.length} heads` });
  box.append(pen);
  const top = middle - thick / 2;
  let concat = top;
  heads.forEach((head, place) => {
    const y = 10 + place * line + size / 2, share = sight.share(head, token) / total, color = CHOSEN[place % CHOSEN.length];
    const width = Math.max(0.8, share * thick), slot = concat + width / 2;
    concat += share * thick;
    pen.append(
      svg("path", { d: `M130 ${middle}C190 ${middle} 190 ${y} ${map} ${y}`, fill: "none", stroke: ink("soft"), "stroke-width": 1.2, opacity: 0.7 }),
      svg("path", { d: `M${map + size + 130} ${y}C${out - 60} ${y} ${out - 70} ${slot} ${out} ${slot}`, fill: "none", stroke: color, "stroke-width": width, opacity: 0.75 }, svg("title", {}, `${head}: ${number(share, 3)} of the output`)),
      svg("rect", { x: out, y: slot - width / 2, width: 26, height: width, fill: color }),
      svg("path", { d: `M${out + 26} ${slot}C${out + 80} ${slot} ${out + 80} ${slot} ${blend} ${slot}`, fill: "none", stroke: color, "stroke-width": width, opacity: 0.45 }),
      svg("text", { x: map + size + 8, y: y - 2 }, svg("tspan", { "font-weight": "bold" }, head), ` ${brief(most(sight, head, token), 17)}`),
      svg("text", { class: "soft", x: map + size + 8, y: y + 11 }, share < 0.005 ? "under 1% of output" : `${Math.round(share * 100)}% of output`));
    box.append(smallMap(sight, head, token, size, map, y - size / 2));
  });
  pen.append(
    svg("rect", { x: 14, y: middle - 40, width: 20, height: 80, rx: 4, fill: ink("accent") }),
    svg("rect", { x: 34, y: middle - 1, width: 96, height: 2, fill: ink("soft") }),
    svg("text", { x: 14, y: middle - 48 }, `x of “${brief(sight.tokens[token], 12)}”`),
    svg("text", { class: "soft", x: out + 34, y: Math.max(12, top - 10) }, "concatenated"),
    svg("rect", { x: blend, y: top - 6, width: 46, height: thick + 12, rx: 6, fill: ink("paper"), stroke: ink("text") }),
    svg("text", { x: blend + 23, y: middle + 4, "text-anchor": "middle" }, "W_O"),
    svg("path", { d: `M${blend + 46} ${middle}L${end} ${middle}`, stroke: ink("accent"), "stroke-width": 10, opacity: 0.8 }),
    svg("rect", { x: end, y: middle - 40, width: 20, height: 80, rx: 4, fill: ink("accent") }),
    svg("text", { x: end + 10, y: middle - 48, "text-anchor": "middle" }, "added to x"));
  return box;
}

// The map of a head with the row of the token framed; a click opens the view of the head.
function smallMap(sight, head, token, size, left, top) {
  const { size: n, bytes } = sight.thumb(head, 64);
  const small = paintMap(Float32Array.from(bytes, (byte) => (byte / 255) ** 2), n);
  small.style.width = small.style.height = "100%";
  small.style.imageRendering = "pixelated";
  small.style.inset = "0";
  const frame = el("span", { style: { position: "absolute", left: "0", right: "0", top: `${(100 * Math.floor((token * n) / sight.n)) / n}%`, height: `${Math.max(2, 100 / n)}%`, outline: `2px solid ${ink("focus")}` } });
  return el("button", { type: "button", class: "map", "aria-label": `Open head ${head}`, onclick: () => change({ view: "card", head }),
    style: { left: `${left}px`, top: `${top}px`, width: `${size}px`, height: `${size}px` } }, small, frame);
}
