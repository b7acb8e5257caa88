// Overview of all heads, layers × heads, drawn on one canvas with transparent buttons on top for keyboard and screen readers.

import { el, section, choice, tools, press, canvas, number, brief } from "./dom.js";
import { state, change } from "./state.js";
import { store, describe, describeRole, openSentence, EVIDENCE_LEVELS, IDLE_NAMES } from "./report.js";
import { roleColor, roleMark, roleBadge, letterInk, strength, ramp, ink } from "./color.js";
import { fewBits } from "./plan.js";
import { word } from "./glossary.js";

const SORTS = [["layer", "layers × heads"], ["score", "score"], ["evidence_level", "evidence"], ["role", "role"], ["importance", "importance"],
  ["entropy", "entropy"], ["confidence", "confidence"], ["output share", "output share"]];

export async function overview(root) {
  const sight = await openSentence(state.sentence);
  const peek = el("aside", { class: "peek", "aria-label": "Preview of a head", "aria-live": "polite" });
  const board = el("div", { class: "board" });
  root.append(
    tools(
      search(() => mark(board)),
      choice("role", [["", "all roles"], ...roles().map(([role, count]) => [role, `${role} (${count})`])], state.role, (role) => change({ role })),
      costFilters().length > 1 && choice("cost", costFilters(), state.cost_filter, (chosen) => change({ cost_filter: chosen })),
      choice("order", [...SORTS.filter(([key]) => key !== "importance" || store.report.importance), ...costs()], state.sort, (sort) => change({ sort })),
      choice("thumbnails", [["map", "attention maps"], ["offsets", "attention by distance"]], picture(sight), (thumb) => change({ thumb })),
      store.sentences.length > 0 && choice("sentence", store.sentences.map((one, i) => [i, brief(one.given.text, 50)]), state.sentence,
        (place) => change({ sentence: Number(place) }))),
    el("div", { class: "split" }, board, el("div", { class: "side" }, peek, legend())));
  draw(board, sight);
  tell(peek, store.heads.get(state.head) ?? null);
  listen(board, peek);
  mark(board);
}

function search(act) {
  const box = el("input", { type: "search", "data-key": "search", value: state.search, placeholder: "5.1, induction, a word …",
    oninput: (event) => { change({ search: event.target.value }, true); act(); } });
  return el("label", { class: "choice" }, el("span", {}, "find"), box);
}

// Filters by cost: heads changed by a plan, and heads with or without a measurable cost of quantization.
const COST_FILTERS = {
  free: ({ cost }) => cost?.costs.length > 0 && cost.costs.every(({ low, high }) => low <= 0 && high >= 0),
  costly: ({ cost }) => cost?.costs.some(({ low }) => low > 0),
  pruned: ({ cost }) => cost?.pruned, bits: ({ cost }) => cost && fewBits(cost), cache: ({ cost }) => cost?.cache?.reduced,
};
const COST_FILTER_NAMES = { free: "no measurable quantization cost", costly: "measurable quantization cost", pruned: "pruned by the plan", bits: "quantized", cache: "reduced cache" };

function costFilters() {
  return [["", "all costs"], ...Object.keys(COST_FILTERS).filter((key) => store.report.heads.some(COST_FILTERS[key])).map((key) => [key, COST_FILTER_NAMES[key]])];
}

// Sort orders by quantization cost.
function costs() {
  return (store.report.heads[0]?.cost?.costs ?? []).map(({ part, bits }) => [`cost ${part} ${bits}`, `cost of ${part} at ${bits} bits`]);
}

function picture(sight) {
  return sight === null ? "offsets" : state.thumb;
}

// Roles with their number of heads, the most frequent first.
function roles() {
  const counts = new Map();
  for (const head of store.report.heads) for (const role of head.roles.length ? head.roles : [head.role]) counts.set(role, (counts.get(role) ?? 0) + 1);
  return [...counts].sort((a, b) => (a[0] === "unclear") - (b[0] === "unclear") || b[1] - a[1]);
}

// Rows of cells: one row per layer, or a wrapped list in another order.
function rows() {
  if (state.sort === "layer")
    return store.report.model.layers.map((layer) => ({ name: layer.address, heads: layer.heads }));
  const shown = store.report.heads.filter((head) => !state.role || hasRole(head, state.role));
  const key = {
    score: (head) => -(head.score ?? -1), evidence_level: (head) => -EVIDENCE_LEVELS.indexOf(head.evidence_level) - (head.score ?? 0) / 10,
    importance: (head) => -(head.importance?.importance ?? -Infinity),
  }[state.sort] ?? (state.sort.startsWith("cost ") ? (head) => -(costOf(head) ?? -Infinity) : null) ?? ((head) => -(head.metrics[state.sort] ?? -Infinity));
  const ordered = state.sort === "role" ? shown.sort((a, b) => a.role.localeCompare(b.role)) : shown.sort((a, b) => key(a) - key(b));
  const wide = Math.max(8, Math.min(32, Math.ceil(Math.sqrt(ordered.length * 1.6))));
  const made = [];
  for (let at = 0; at < ordered.length; at += wide)
    made.push({ name: String(at + 1), heads: ordered.slice(at, at + wide).map((head) => head.address) });
  return made;
}

function costOf(head) {
  const [, part, bits] = state.sort.split(" ");
  return head.cost?.costs.find((one) => one.part === part && one.bits === Number(bits))?.loss_increase;
}

function draw(board, sight) {
  const lines = rows();
  const widest = Math.max(1, ...lines.map((line) => (state.sort === "layer" ? numberOf(line.heads.at(-1)) + 1 : line.heads.length)));
  const room = Math.max(280, board.clientWidth - 64);
  const size = Math.max(24, Math.min(84, Math.floor(room / widest), Math.max(46, Math.floor(1500 / lines.length))));
  const wide = widest * size, high = Math.max(size, lines.length * size);
  const [picture_, pen] = canvas(wide, high, { class: "under", "aria-hidden": "true" });
  const sheet = el("div", { class: "sheet", role: "grid", "aria-label": `${store.report.heads.length} heads`, "aria-rowcount": lines.length,
    style: { "--cell": `${size}px`, "--wide": widest } });
  const scale = pictures(sight);
  lines.forEach((line, y) => {
    const row = el("div", { role: "row", class: "line" }, el("span", { role: "rowheader", class: "name" }, line.name));
    if (line.heads.length === 0) row.append(el("span", { role: "gridcell", class: "none" }, "no heads"));
    line.heads.forEach((address, place) => {
      const x = state.sort === "layer" ? numberOf(address) : place;
      const head = store.heads.get(address);
      paint(pen, head, x * size, y * size, size, scale);
      row.append(el("button", { type: "button", role: "gridcell", class: "cell", tabindex: "-1", "data-head": address,
        "aria-label": `head ${address}: ${describe(head)}`, style: { "grid-column": x + 2 } }));
    });
    sheet.append(row);
  });
  const numbers = state.sort === "layer" && el("div", { class: "line numbers", "aria-hidden": "true", style: { "--cell": `${size}px`, "--wide": widest } },
    el("span", { class: "name" }, ""), Array.from({ length: widest }, (_, x) => el("span", {}, String(x))));
  sheet.prepend(picture_);
  const across = el("p", { class: "axis-name", "aria-hidden": "true" }, state.sort === "layer" ? "↓ layer, → head" : `sorted by ${state.sort}, ↓ rank`);
  board.replaceChildren(...[across, numbers, sheet].filter(Boolean));
  const first = sheet.querySelector(`[data-head="${CSS.escape(state.head)}"]`) ?? sheet.querySelector(".cell");
  first?.setAttribute("tabindex", "0");
}

function numberOf(address) {
  return address === undefined ? 0 : Number(address.split(".").at(-1));
}

// All thumbnails in one atlas, so that each cell is one copy operation; and the size of each.
function pictures(sight) {
  const colors = ramp();
  const importances = store.report.heads.map((head) => head.importance?.importance ?? null);
  const largest = store.report.importance ? Math.max(1e-12, ...importances.filter((importance) => importance !== null)) : null;
  const sizeOf = (head) => (largest === null || !head.importance ? 1 : 0.35 + 0.65 * Math.sqrt(Math.max(0, head.importance.importance) / largest));
  if (picture(sight) === "offsets") return { sizeOf, bars: true };
  const heads = sight.heads, each = sight.thumb(heads[0]).size, across = Math.ceil(Math.sqrt(heads.length));
  const atlas = el("canvas", { width: across * each, height: Math.ceil(heads.length / across) * each });
  const pen = atlas.getContext("2d"), image = pen.createImageData(atlas.width, atlas.height);
  const places = new Map();
  heads.forEach((head, place) => {
    const left = (place % across) * each, top = Math.floor(place / across) * each, { bytes } = sight.thumb(head);
    places.set(head, [left, top]);
    for (let i = 0; i < each; i++)
      for (let j = 0; j < each; j++) {
        const at = ((top + i) * atlas.width + left + j) * 4, [r, g, b] = colors[bytes[i * each + j]];
        image.data[at] = r; image.data[at + 1] = g; image.data[at + 2] = b; image.data[at + 3] = 255;
      }
  });
  pen.putImageData(image, 0, 0);
  return { sizeOf, bars: false, atlas, places, each };
}

function paint(pen, head, x, y, size, scale) {
  ground(pen, head, x, y, size);
  const rim = Math.max(2, Math.round(size * 0.09)), inner = (size - 2 - 2 * rim) * scale.sizeOf(head);
  const left = x + (size - inner) / 2, top = y + (size - inner) / 2;
  const from = scale.bars ? null : scale.places.get(head.address);
  if (scale.bars) bars(pen, head, left, top, inner);
  else if (from) {
    pen.imageSmoothingEnabled = inner < scale.each;
    pen.drawImage(scale.atlas, from[0], from[1], scale.each, scale.each, left, top, inner, inner);
  }
  plate(pen, head, x, y, size);
}

// One band per role, at most three; the opacity shows the evidence level.
function ground(pen, head, x, y, size) {
  const there = head.roles.slice(0, 3), wide = (size - 2) / Math.max(1, there.length);
  if (!there.length) {
    pen.fillStyle = roleColor("unclear", strength("none"));
    pen.fillRect(x + 1, y + 1, size - 2, size - 2);
  }
  there.forEach((role, place) => {
    const level = head.evidence.find((one) => one.role === role)?.evidence_level ?? head.evidence_level;
    pen.fillStyle = roleColor(role, strength(level));
    pen.fillRect(x + 1 + place * wide, y + 1, wide, size - 2);
  });
}

// The letters of the first role, with a + if there are more.
function plate(pen, head, x, y, size) {
  if (!head.roles.length) return;
  const high = Math.max(8, Math.min(13, size * 0.27)), letters = roleBadge(head.role)[0] + (head.roles.length > 1 ? "+" : "");
  pen.font = `600 ${high}px system-ui, sans-serif`;
  const wide = pen.measureText(letters).width + 4;
  pen.fillStyle = roleColor(head.role);
  pen.fillRect(x + 1, y + 1, wide, high + 3);
  pen.fillStyle = letterInk(head.role);
  pen.textBaseline = "top";
  pen.fillText(letters, x + 3, y + 2.5);
}

function bars(pen, head, left, top, inner) {
  pen.fillStyle = ink("paper");
  pen.fillRect(left, top, inner, inner);
  pen.fillStyle = ink("accent");
  const wide = inner / Math.max(1, head.offsets.length);
  head.offsets.forEach(([, weight], i) => {
    const high = inner * Math.sqrt(Math.min(1, weight ?? 0));
    pen.fillRect(left + i * wide, top + inner - high, Math.max(0.5, wide), high);
  });
}

// Pointer and keyboard: arrow keys move through the grid, Enter opens a head.
function listen(board, peek) {
  const sheet = board.querySelector(".sheet");
  const at = (event) => event.target.closest?.(".cell");
  const show = (event) => { const cell = at(event); if (cell) tell(peek, store.heads.get(cell.dataset.head)); };
  sheet.addEventListener("pointerover", show);
  sheet.addEventListener("focusin", show);
  sheet.addEventListener("click", (event) => { const cell = at(event); if (cell) change({ head: cell.dataset.head, view: "card" }); });
  sheet.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -99], End: [0, 99] }[event.key];
    const cell = at(event);
    if (!step || !cell) return;
    event.preventDefault();
    const lines = [...sheet.querySelectorAll('[role="row"]')].map((line) => [...line.querySelectorAll(".cell")]).filter((line) => line.length);
    const y = lines.findIndex((line) => line.includes(cell)), x = lines[y].indexOf(cell);
    const line = lines[Math.max(0, Math.min(lines.length - 1, y + step[0]))];
    const next = line[Math.max(0, Math.min(line.length - 1, x + step[1]))];
    cell.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}

// Whether a role is among the roles of a head.
function hasRole(head, role) {
  return head.role === role || head.roles.includes(role);
}

// Searchable text of a head, including its summary and examples; cached.
const haystacks = new Map();
function haystack(head) {
  if (!haystacks.has(head)) {
    const texts = [...head.examples.flatMap((one) => one.examples), ...head.top_contexts].map((one) => one.segments.map(([, text]) => text).join(""));
    const names = [head.address, head.role, head.detail, head.evidence_level, ...head.idle_patterns, ...head.evidence.map((one) => one.role)];
    haystacks.set(head, [...names, ...head.summary.map(([, text]) => text), ...texts].join(" ").toLowerCase());
  }
  return haystacks.get(head);
}

// Dim the cells that do not match, without redrawing.
function mark(board) {
  const wanted = state.search.trim().toLowerCase(), filter = COST_FILTERS[state.cost_filter];
  for (const cell of board.querySelectorAll(".cell")) {
    const head = store.heads.get(cell.dataset.head);
    const found = !wanted || (/^[\d.]+$/.test(wanted) ? head.address.startsWith(wanted) : haystack(head).includes(wanted));
    cell.classList.toggle("dim", !(found && (!state.role || hasRole(head, state.role)) && (!filter || filter(head))));
    cell.classList.toggle("here", head.address === state.head);
  }
}

function tell(peek, head) {
  if (head === null) return peek.replaceChildren(el("p", { class: "note" }, "Hover over a head, or move through the grid with the arrow keys. Enter opens the head."));
  const [first] = head.examples, examples = first?.examples ?? [], seen = examples.find((one) => one.hit) ?? examples[0] ?? head.top_contexts[0];
  peek.replaceChildren(...[
    el("h2", {}, `${head.address} `, (head.roles.length ? head.roles : ["unclear"]).slice(0, 3).map(roleMark), ` ${describeRole(head)}`),
    head.corpus_label && el("p", {}, `evaluated on ${head.corpus_label}`),
    el("p", {}, word(head.evidence_level), head.score === null ? "" : `: score ${number(head.score, 2)}, `, head.score === null ? "" : word("baseline"), head.score === null ? "" : ` ${number(head.baseline, 2)}`),
    head.idle_patterns.length > 0 && el("p", {}, word("idle pattern"), ": ", head.idle_patterns.flatMap((one, i) => [i ? ", " : "", word(IDLE_NAMES[one] ?? one, one)])),
    head.importance && el("p", {}, word("importance"), ` ${number(head.importance.importance, 4)}`),
    seen && el("p", { class: "context" }, seen.segments.map(([kind, text]) => (kind ? el("mark", { class: kind }, text) : text))),
    press("Details", () => change({ head: head.address, view: "card" }), { class: "small" }),
  ].filter(Boolean));
}

function legend() {
  const sample = (style) => el("span", { class: "sample", style });
  return section("Legend",
    el("ul", { class: "legend" }, roles().map(([role, count]) => el("li", {},
      el("button", { type: "button", "aria-pressed": String(state.role === role), "data-key": `legend ${role}`,
        onclick: () => change({ role: state.role === role ? "" : role }) },
        roleMark(role), ` ${role} `, el("small", {}, count))))),
    el("p", { class: "note" }, "Opacity shows the evidence level:"),
    el("ul", { class: "levels" }, EVIDENCE_LEVELS.map((level) => el("li", {}, sample({ background: level === "none" ? roleColor(level, 0.3) : roleColor("induction", strength(level)) }), " ", word(level)))),
    store.report.importance && el("p", { class: "note" }, "The size of a thumbnail shows the importance of the head."),
    el("p", { class: "note" }, state.thumb === "map" && store.sentences.length ? "Thumbnails: attention maps, rows are queries and columns are keys. Darker (lighter in the dark theme) is more weight." : "Thumbnails: mean weight by distance, distant tokens on the left, the token itself " + (ahead() ? "in the middle, later tokens on the right." : "on the right.")));
}

function ahead() {
  return store.report.heads.some((head) => head.offsets.some(([offset]) => offset < 0));
}
