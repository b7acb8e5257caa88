// Notebook widget: a clickable grid of heads, or a sentence with a choice of heads. Texts are inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const LINE = 18, COLUMN = 150;

function make(parent, name, text = "", style = "") {
  const node = document.createElement(name);
  node.textContent = text;
  node.style.cssText = style;
  parent.append(node);
  return node;
}

function shape(parent, name, attributes, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function showProfile(el, data) {
  const table = make(el, "table", "", "border-collapse:collapse");
  const summary = make(el, "div", "Click on a head.", "font:13px sans-serif;margin-top:8px");
  for (const layer of data.layers) {
    const row = make(table, "tr");
    make(row, "th", layer, "font:11px sans-serif;color:#9aa1a9");
    for (const head of data.heads.filter((one) => one.layer === layer)) {
      const cell = make(row, "td", "", "padding:1px");
      const button = make(cell, "button", head.letters, "width:26px;height:22px;border:0;border-radius:3px;cursor:pointer;font:11px sans-serif");
      button.style.background = head.color + Math.round(255 * head.strength).toString(16).padStart(2, "0");
      button.style.color = head.strength > 0.5 && head.letters ? "#fff" : "#22262b";
      button.title = `${head.head}: ${head.role} (${head.evidence_level})`;
      button.setAttribute("aria-label", button.title);
      button.onclick = () => tell(summary, head);
    }
  }
}

function tell(summary, head) {
  summary.replaceChildren();
  make(summary, "b", `head ${head.head}: ${head.role} (${head.evidence_level})`);
  for (const line of head.summary) make(summary, "div", line);
  for (const [weight, text] of head.examples) make(summary, "div", `${weight.toFixed(2)}  ${text}`);
}

function showAttention(el, data) {
  const choice = make(el, "select");
  choice.setAttribute("aria-label", "head");
  for (const head of Object.keys(data.maps)) make(choice, "option", head);
  choice.value = data.first;
  const place = make(el, "div");
  const draw = () => drawLines(place, data.maps[choice.value]);
  choice.onchange = draw;
  draw();
}

function drawLines(place, map) {
  place.replaceChildren();
  const left = 8 * Math.max(...map.queries.map((word) => word.length)) + 10;
  const right = 8 * Math.max(...map.keys.map((word) => word.length)) + 10;
  const tall = LINE * Math.max(map.queries.length, map.keys.length) + 12;
  const svg = shape(place, "svg", { width: left + COLUMN + right, height: tall, style: "font:13px sans-serif" });
  const y = (at) => 14 + LINE * at;
  const lines = [];
  map.weights.forEach((row, i) => row.forEach((weight, j) => {
    if (weight < 0.02) return;
    const ends = { x1: left + 4, y1: y(i), x2: left + COLUMN - 4, y2: y(j) };
    const line = shape(svg, "line", { ...ends, stroke: "#1f6fb4", "stroke-opacity": Math.min(1, weight), "stroke-width": 0.8 + 2 * weight });
    lines.push([i, line]);
  }));
  const only = (word) => lines.forEach(([i, line]) => { line.style.display = word === null || word === i ? "" : "none"; });
  map.queries.forEach((word, i) => {
    const text = shape(svg, "text", { x: left, y: y(i) + 4, "text-anchor": "end", style: "cursor:default" }, word);
    text.onmouseenter = () => only(i);
    text.onmouseleave = () => only(null);
  });
  map.keys.forEach((word, j) => shape(svg, "text", { x: left + COLUMN, y: y(j) + 4 }, word));
}

function render({ model, el }) {
  const data = model.get("data");
  (data.kind === "profile" ? showProfile : showAttention)(el, data);
}

export default { render };
