// Attention map as a heat map: rows are queries, columns are keys. A cell can be pinned by pointer or keyboard.

import { el, canvas, number, brief } from "./dom.js";
import { ramp, ink } from "./color.js";

// `pinned` is [row, column] or null; `onpin` is called when it changes. `most`: maximum size in pixels. `under`: a thumbnail of the
// full map, used if only the largest weights are known.
export function heatMap({ weights, labels, columns = labels, name, pinned = null, onpin = null, most = 620, onhover = null, under = null }) {
  const n = labels.length, m = columns.length;
  const fits = Math.min(30, most / Math.max(n, m)), cell = fits >= 3 ? Math.floor(fits) : fits;
  const written = cell >= 11, left = written ? 92 : 10, top = written ? 82 : 10; // space for the labels
  const wide = left + m * cell + (written ? 32 : 4), high = top + n * cell + 4;
  const [picture, pen] = canvas(wide, high, { tabindex: "0", role: "img",
    "aria-label": `${name}: ${n} rows by ${m} columns. Arrow keys move, Enter pins.` });
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const base = paintMap(weights, n, m, under !== null);
  const ground = under && paintMap(Float32Array.from(under.bytes, (byte) => (byte / 255) ** 2), under.size);
  let at = pinned;
  const draw = () => {
    pen.clearRect(0, 0, wide, high);
    pen.imageSmoothingEnabled = false;
    if (ground) {
      pen.globalAlpha = 0.6;
      pen.drawImage(ground, left, top, m * cell, n * cell);
      pen.globalAlpha = 1;
    }
    pen.drawImage(base, left, top, m * cell, n * cell);
    pen.strokeStyle = ink("line");
    pen.strokeRect(left + 0.5, top + 0.5, m * cell, n * cell);
    if (written) names(pen, labels, columns, left, top, cell, at);
    if (pinned) cross(pen, pinned, ink("focus"), left, top, cell, n, m);
    if (at) cross(pen, at, ink("text"), left, top, cell, n, m);
    readout.textContent = at ? `${labels[at[0]]} → ${columns[at[1]]}  ${number(weights[at[0] * m + at[1]], 3)}${pinned ? "  (pinned)" : ""}` : "Rows: queries. Columns: keys.";
  };
  const find = (event) => {
    const box = picture.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - top) / cell), column = Math.floor((event.clientX - box.left - left) / cell);
    return row >= 0 && row < n && column >= 0 && column < m ? [row, column] : null;
  };
  const move = (next) => {
    if (next?.[0] === at?.[0] && next?.[1] === at?.[1]) return;
    at = next;
    draw();
    onhover?.(at);
  };
  const pin = (next) => {
    pinned = next && pinned && next[0] === pinned[0] && next[1] === pinned[1] ? null : next;
    draw();
    onpin?.(pinned);
  };
  picture.addEventListener("pointermove", (event) => move(find(event) ?? pinned));
  picture.addEventListener("pointerleave", () => move(pinned));
  picture.addEventListener("click", (event) => pin(find(event)));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) {
      event.preventDefault();
      const from = at ?? [0, 0];
      move([Math.max(0, Math.min(n - 1, from[0] + step[0])), Math.max(0, Math.min(m - 1, from[1] + step[1]))]);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pin(at);
    } else if (event.key === "Escape" && pinned) {
      event.stopPropagation();
      pin(null);
    }
  });
  draw();
  return el("div", {}, el("div", { class: "heat" }, picture), readout);
}

// One pixel per weight, to be scaled up; `clear`: transparent if the weight is 0.
export function paintMap(weights, n, m = n, clear = false) {
  const base = el("canvas", { width: Math.max(1, m), height: Math.max(1, n) });
  const pen = base.getContext("2d"), image = pen.createImageData(Math.max(1, m), Math.max(1, n)), colors = ramp();
  for (let at = 0; at < n * m; at++) {
    const [r, g, b] = colors[Math.round(Math.sqrt(Math.min(1, Math.max(0, weights[at]))) * 255)];
    image.data[at * 4] = r; image.data[at * 4 + 1] = g; image.data[at * 4 + 2] = b; image.data[at * 4 + 3] = clear && weights[at] === 0 ? 0 : 255;
  }
  pen.putImageData(image, 0, 0);
  return base;
}

function names(pen, labels, columns, left, top, cell, at) {
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  labels.forEach((label, i) => {
    pen.fillStyle = at && at[0] === i ? ink("text") : ink("soft");
    pen.textAlign = "right";
    pen.fillText(brief(label, 12), left - 5, top + (i + 0.5) * cell);
  });
  columns.forEach((label, j) => {
    pen.fillStyle = at && at[1] === j ? ink("text") : ink("soft");
    pen.textAlign = "left";
    pen.save();
    pen.translate(left + (j + 0.5) * cell, top - 5);
    pen.rotate(-Math.PI / 2.6);
    pen.fillText(brief(label, 11), 0, 0);
    pen.restore();
  });
}

function cross(pen, [row, column], color, left, top, cell, n, m) {
  pen.strokeStyle = color;
  pen.lineWidth = 1.2;
  pen.strokeRect(left + 0.5, top + row * cell + 0.5, m * cell, cell);
  pen.strokeRect(left + column * cell + 0.5, top + 0.5, cell, n * cell);
  pen.lineWidth = 1;
}
