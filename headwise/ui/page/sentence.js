// One sentence: arcs from query to key, an attention map with pinning, and the next token.

import { el, svg, section, choice, tick, tools, press, grid, brief, visible, say } from "./dom.js";
import { state, change } from "./state.js";
import { store, openSentence, chosenHeads } from "./report.js";
import { CHOSEN, roleMark } from "./color.js";
import { heatMap } from "./heat.js";
import { barList } from "./chart.js";
import { livePanel, explainPanel } from "./live.js";
import { overPicture } from "./patches.js";

const FAINT = 0.1, ARCS = 400;

export async function sentence(root) {
  const sight = await openSentence(state.sentence);
  if (store.live && !store.report.metadata.image_grid) root.append(livePanel());
  if (sight === null) return root.append(el("p", { class: "note" }, "No sentence yet."));
  if (sight.image) return root.append(...(await pictureView(sight)));
  const words = state.level === "word", tokenOf = (at) => (words && at >= 0 ? sight.tokensOf[at].at(-1) : at);
  const pick = (at) => chosenHeads(sight, tokenOf(at)), chips = el("div", { class: "picked" });
  const fill = (heads) => chips.replaceChildren(headChips(sight, heads));
  const heads = pick(state.token);
  fill(heads);
  root.append(
    tools(
      choice("sentence", store.sentences.map((one, i) => [i, brief(one.given.text, 60)]), state.sentence, (place) => change({ sentence: Number(place), token: -1, pin: "" })),
      choice("level", [["token", "tokens"], ["word", "words"]], state.level, (level) => change({ level, token: -1, pin: "" })),
      tick("weight by value norms", state.value_weighted, (checked) => change({ value_weighted: checked })),
      tick("show idle attention", state.idle, (checked) => change({ idle: checked }))),
    chips,
    el("div", { class: "stack" }, arcs(sight, pick, words, fill), el("div", { class: "pair" }, mapSection(sight, heads, words), nextWord(sight))));
}

// The view of an image, whose tokens are patches.
async function pictureView(sight) {
  const heads = chosenHeads(sight, state.token), chosen = tools(
    choice("image", store.sentences.map((one, i) => [i, brief(one.given.text, 60)]), state.sentence, (place) => change({ sentence: Number(place), token: -1, pin: "" })),
    tick("weight by value norms", state.value_weighted, (checked) => change({ value_weighted: checked })));
  return [chosen, headChips(sight, heads), el("div", { class: "stack" }, await overPicture(sight, heads), mapSection(sight, heads, false))];
}

function headChips(sight, heads) {
  const set = (some) => change({ heads: some.join(",") });
  const add = (event) => {
    const wanted = event.target.value.trim();
    if (sight.has(wanted)) set([...heads, wanted].slice(-8));
    else if (wanted) say(`${wanted}: no such head. Use an address such as 5.1.`);
  };
  return el("div", { class: "chips tools", role: "group", "aria-label": "Heads shown" },
    !state.heads && el("span", { class: "note" }, "most active heads:"),
    heads.map((head, place) => el("span", { class: "chip", style: { "--chip": CHOSEN[place] } },
      el("button", { type: "button", title: "Open this head", onclick: () => change({ view: "card", head }) }, roleMark(store.heads.get(head)?.role ?? "unclear"), ` ${head} ${store.heads.get(head)?.role ?? ""}`),
      el("button", { type: "button", "aria-label": `Hide ${head}`, onclick: () => set(heads.filter((one) => one !== head)) }, "×"))),
    el("label", { class: "choice" }, el("span", {}, "add head"), el("input", { size: "7", placeholder: "5.1", "data-key": "add head", onchange: add })));
}

function arcs(sight, pick, words, onHeads) {
  let heads = pick(state.token);
  const labels = sight.labels(words);
  const drawing = svg("svg", { height: 150, width: 10, role: "img", "aria-label": "Arcs from each query to the keys it attends to" });
  const where = el("div", { class: "pair" });
  const buttons = labels.map((label, i) => el("button", { type: "button", "data-token": i, "aria-pressed": String(i === state.token) }, label));
  const row = el("div", { class: "tokens", role: "group", "aria-label": "The sentence" }, buttons);
  const strip = el("div", { class: "strip", tabindex: "-1" }, drawing, row);
  const last = sight.special.lastIndexOf(false);
  let places = null, shown = null;
  const show = (active) => {
    if (active === shown) return;
    shown = active;
    if (active >= 0) { // the most active heads from the last hovered word
      heads = pick(active);
      onHeads(heads);
    }
    places ??= buttons.map((button) => button.offsetLeft + button.offsetWidth / 2);
    paintArcs(drawing, sight, heads, words, active, places, row.offsetWidth);
    const strongest = active < 0 || heads.length === 0 ? null : sight.row(heads[0], active, words, state.value_weighted);
    buttons.forEach((button, j) => {
      const part = strongest && (state.idle || !sight.rests(active, j, words)) ? Math.round(Math.sqrt(strongest[j]) * 70) : 0;
      button.style.background = part ? `color-mix(in srgb, ${CHOSEN[0]} ${part}%, var(--paper))` : "";
    });
    if (active >= 0) where.replaceChildren(...looksOf(sight, heads, words, active)); // and it stays: nothing jumps
  };
  const token = (event) => Number(event.target.closest?.("[data-token]")?.dataset.token ?? -1);
  row.addEventListener("pointerover", (event) => show(token(event) >= 0 ? token(event) : state.token));
  row.addEventListener("pointerleave", () => show(state.token));
  row.addEventListener("focusin", (event) => show(token(event)));
  row.addEventListener("click", (event) => {
    const at = token(event);
    if (at < 0) return;
    change({ token: at === state.token ? -1 : at }, true);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === state.token)));
    shown = null;
    show(state.token);
  });
  where.replaceChildren(...looksOf(sight, heads, words, state.token >= 0 ? state.token : words ? sight.wordOf[last] : last));
  requestAnimationFrame(() => show(state.token));
  return section(words ? "Attention between words" : "Attention between tokens", strip,
    el("p", { class: "note" }, `Hover over a ${words ? "word" : "token"} to see its attention in each head; click to pin it.`
      + (state.idle ? "" : " Idle attention (to the first token, special tokens and the token itself) is hidden.")
      + (sight.full ? "" : ` Only the ${sight.perRow} largest weights of each of the ${sight.n} tokens are stored.`)
      + (sight.truncatedFrom ? ` The text has ${sight.truncatedFrom} tokens; the first ${sight.n} are shown.` : "")), where);
}

function paintArcs(drawing, sight, heads, words, active, places, wide) {
  const found = [];
  heads.forEach((head, place) => {
    const rows = active < 0 ? places.keys() : [active];
    for (const i of rows) sight.row(head, i, words, state.value_weighted).forEach((weight, j) => {
      if (weight >= (active < 0 ? FAINT : 0.02) && (state.idle || !sight.rests(i, j, words))) found.push([weight, i, j, place]);
    });
  });
  found.sort((a, b) => b[0] - a[0]);
  const high = 150;
  drawing.setAttribute("width", wide);
  drawing.replaceChildren(...found.slice(0, ARCS).reverse().map(([weight, i, j, place]) => {
    const from = places[i] + place * 2 - 3, to = places[j] + place * 2 - 3, rise = Math.min(high - 6, 14 + Math.abs(to - from) * 0.42);
    const d = i === j ? `M${from - 5} ${high}C${from - 14} ${high - 26} ${from + 14} ${high - 26} ${from + 5} ${high}`
      : `M${from} ${high}C${from} ${high - rise * 1.32} ${to} ${high - rise * 1.32} ${to} ${high}`;
    return svg("path", { d, fill: "none", stroke: CHOSEN[place], "stroke-width": 0.6 + 3 * weight, opacity: Math.min(1, 0.3 + weight).toFixed(2) });
  }));
}

// Two tables: the chosen heads, and the heads with the largest weights from this position.
function looksOf(sight, heads, words, i) {
  const labels = sight.labels(words);
  const best = (head) => [...sight.row(head, i, words, state.value_weighted)].map((weight, j) => [weight, j]).filter(([, j]) => state.idle || !sight.rests(i, j, words)).sort((a, b) => b[0] - a[0]).slice(0, 3);
  const format = (pairs) => pairs.filter(([weight]) => weight >= 0.005).map(([weight, j]) => `${labels[j]} ${weight.toFixed(2)}`).join(",  ") || "idle";
  const hardest = sight.hardest(i, 8, words, state.value_weighted);
  return [
    grid(`Attention from “${labels[i]}”`, ["head", "role", "attends to"], heads.map((head) => [head, store.heads.get(head)?.role ?? "", format(best(head))])),
    grid(`Heads with the largest weights from “${labels[i]}”, excluding idle attention`, ["head", "role", "attends to", "weight"],
      hardest.map(([head, j, weight]) => [head, store.heads.get(head)?.role ?? "", labels[j], [weight, 2]])),
  ];
}

function mapSection(sight, heads, words) {
  const head = sight.has(state.head) && heads.includes(state.head) ? state.head : heads[0];
  if (!head) return section("Map", el("p", { class: "note" }, "Choose a head above."));
  const labels = sight.labels(words), pin = state.pin.split(",").map(Number);
  const pinned = pin.length === 2 && pin.every((place) => place >= 0 && place < labels.length) ? pin : null;
  const rowTable = el("div", {}), reasons = el("div", {});
  const mayAsk = store.live && !sight.image && (store.report.model.kind ?? "decoder") === "decoder";
  const fillReasons = (at) => reasons.replaceChildren(...(at === null || !mayAsk ? [] : [explainPanel(store.sentences[state.sentence].given.text, head, at[0], at[1], labels, words)]));
  const fillRow = (at) => rowTable.replaceChildren(at === null ? el("p", { class: "note" }, "Pin a row to see its weights.")
    : grid(`Attention from “${labels[at[0]]}” in ${head}`, ["key", "weight"],
      [...sight.row(head, at[0], words, state.value_weighted)].map((weight, j) => [labels[j], [weight, 3]]).filter(([, [weight]]) => weight > 0)));
  fillRow(pinned);
  fillReasons(pinned);
  return section(`Map of ${head}`,
    el("div", { class: "tools" }, choice("head", heads.map((one) => [one, `${one} ${store.heads.get(one)?.role ?? ""}`]), head, (one) => change({ head: one }))),
    heatMap({ weights: sight.map(head, words, state.value_weighted), labels, name: `Attention of head ${head}`, pinned, under: sight.under(head),
      onpin: (at) => { change({ pin: at ? at.join(",") : "" }, true); fillRow(at); fillReasons(at); } }),
    reasons,
    el("details", { open: pinned !== null }, el("summary", {}, "Row as a table"), rowTable));
}

function nextWord(sight) {
  if (!sight.next) return null; // an encoder does not predict a next token
  const { likely, shares, other_parts: rest, logit } = sight.next;
  const made = [section("Next token", barList(likely.map(([word, p]) => [visible(word), p]), 3, true))];
  if (shares) {
    const parts = Object.entries(shares).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 14);
    const named = (head) => press(head, () => change({ view: "card", head }), { class: "small" });
    made.push(section(`Direct contribution of each head to “${visible(likely[0][0])}”`,
      el("p", { class: "note" }, `In logits, through the final norm only; all parts sum to ${logit.toFixed(2)}. The 14 largest of ${Object.keys(shares).length} heads:`),
      barList(parts.map(([head, share]) => [named(head), share])), el("h3", {}, "Other parts"), barList(Object.entries(rest))));
  }
  return el("div", { class: "stack" }, made);
}
