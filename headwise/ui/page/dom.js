// DOM elements. Data is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// el("p", { class: "note", onclick: act }, "text", child): an element; properties that are null are omitted.
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

// An SVG element.
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

// A section with a heading.
export function section(title, ...children) {
  return el("section", { "aria-label": title }, el("h2", {}, title), ...children);
}

// A labeled select; options are [value, text].
export function choice(label, options, value, act, key) {
  const select = el("select", { "data-key": key ?? label, onchange: (event) => act(event.target.value) },
    options.map(([one, text]) => el("option", { value: one, selected: String(one) === String(value) }, text)));
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

// Controls in a row, collapsed on a narrow screen.
let controlsOpen = false;
export function tools(...children) {
  return el("details", { class: "fold", open: controlsOpen || globalThis.innerWidth > 500, ontoggle: (event) => { if (globalThis.innerWidth <= 500) controlsOpen = event.target.open; } },
    el("summary", {}, "Controls"), el("div", { class: "tools" }, children));
}

// A checkbox with a label.
export function tick(label, on, act) {
  const box = el("input", { type: "checkbox", "data-key": label, checked: on, onchange: (event) => act(event.target.checked) });
  return el("label", { class: "tick" }, box, label);
}

export function press(label, act, properties = {}) {
  return el("button", { type: "button", "data-key": label, ...properties, onclick: act }, label);
}

// A table. A cell is text, a count, a node, or [number, digits]; data-value has the unrounded number.
export function grid(caption, columns, rows, properties = {}) {
  const head = el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) => el("tr", {}, row.map((cell, place) => tableCell(cell, place === 0))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", properties, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)));
}

function tableCell(cell, first) {
  const tag = first ? "th" : "td";
  const scope = first ? "row" : null;
  const [value, digits] = Array.isArray(cell) ? cell : [cell];
  if (Array.isArray(cell) && value === null) return el(tag, { scope, class: "number" }, "–");
  if (typeof value === "number") return el(tag, { scope, class: "number", "data-value": value }, number(value, digits));
  return el(tag, { scope }, value ?? "");
}

// Format a number: integers in full, others with `digits` decimals, or "short" for four significant digits; "–" if missing.
export function number(value, digits) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (digits === "short") return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
  if (digits === undefined) return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(2);
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(0);
  return value.toFixed(digits);
}

// A number with its sign.
export function signed(value, digits = 2) {
  return Number.isFinite(value) && value >= 0 ? `+${number(value, digits)}` : number(value, digits);
}

// A canvas with device resolution; its context is scaled to CSS pixels.
export function canvas(width, height, properties = {}) {
  const dense = Math.min(globalThis.devicePixelRatio || 1, 2);
  const node = el("canvas", { ...properties, width: Math.round(width * dense), height: Math.round(height * dense) });
  node.style.width = `${width}px`;
  node.style.height = `${height}px`;
  const pen = node.getContext("2d");
  pen.scale(dense, dense);
  return [node, pen];
}

// Show a status message, which screen readers announce.
export function say(text) {
  document.getElementById("status").textContent = text;
}

// Truncate a text to a number of characters.
export function brief(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// Replace whitespace in a token by visible symbols.
export function visible(word) {
  return word.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";
}
