// Attention on an image: from one patch, from another token, or averaged over all patches.

import { el, canvas, section, number } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./report.js";
import { CHOSEN, ink } from "./color.js";

const PANEL = 260, EVEN = 4; // full opacity is at least four times uniform attention, so that diffuse heads stay faint

// The image once per head, overlaid with weights; a click on a patch selects it as query.
export async function overPicture(sight, heads) {
  const image = new Image();
  image.src = `data:image/png;base64,${sight.image.png}`;
  await image.decode();
  const panels = heads.map((head, place) => patchPanel(sight, image, head, CHOSEN[place]));
  const query = el("p", { class: "readout", "aria-live": "polite" });
  const buttons = [[-1, "all patches"], ...sight.tokens.map((name, i) => [i, name]).filter(([i]) => sight.image.cells[i] < 0)]
    .map(([i, name]) => el("button", { type: "button", class: "small", "data-token": i, onclick: () => from(i) }, name));
  const show = (at) => {
    for (const one of panels) one.draw(at);
    query.textContent = at < 0 ? "Query: mean over all patches." : `Query: ${sight.tokens[at]}.`;
    for (const button of buttons) button.setAttribute("aria-pressed", String(Number(button.dataset.token) === at));
  };
  const from = (at) => { change({ token: at === state.token ? -1 : at }, true); show(state.token); };
  for (const one of panels) one.listen(from, show);
  show(state.token < sight.n ? state.token : -1);
  return section("Attention on the image",
    el("div", { class: "tools" }, buttons), query,
    el("div", { class: "over" }, panels.map((one) => one.node)),
    el("p", { class: "note" }, "Hover over a patch to see its attention in each head; click to pin it. Opacity shows the weight: full opacity is the largest weight of the head, but at least four times uniform attention. The weights on tokens that are not patches are listed below."));
}

function patchPanel(sight, image, head, color) {
  const { rows, columns, cells } = sight.image;
  const wide = Math.min(PANEL, globalThis.innerWidth - 70), high = Math.round((wide * image.height) / image.width);
  const [picture, pen] = canvas(wide, high, { tabindex: "0", role: "img", "data-head": head,
    "aria-label": `Head ${head} on the image, ${rows} rows of ${columns} patches. Arrow keys move, Enter pins a patch.` });
  const readout = el("p", { class: "readout" });
  const place = new Map(cells.map((cell, token) => [cell, token]));
  const across = wide / columns, down = high / rows;
  let now = -1;
  const draw = (at) => {
    now = at;
    const row = at < 0 ? meanOfPatches(sight, head) : sight.row(head, at, false, state.value_weighted);
    const most = Math.max(EVEN / sight.n, ...cells.map((cell, token) => (cell < 0 ? 0 : row[token])));
    pen.globalAlpha = 1;
    pen.imageSmoothingEnabled = image.width > wide;
    pen.drawImage(image, 0, 0, wide, high);
    pen.fillStyle = ink("paper");
    pen.globalAlpha = 0.35;
    pen.fillRect(0, 0, wide, high);
    pen.fillStyle = color;
    cells.forEach((cell, token) => {
      if (cell < 0) return;
      pen.globalAlpha = 0.85 * (row[token] / most);
      pen.fillRect((cell % columns) * across, Math.floor(cell / columns) * down, across, down);
    });
    pen.globalAlpha = 1;
    if (at >= 0 && cells[at] >= 0) {
      pen.strokeStyle = ink("focus");
      pen.lineWidth = 2.5;
      pen.strokeRect((cells[at] % columns) * across + 1, Math.floor(cells[at] / columns) * down + 1, across - 2, down - 2);
    }
    const others = sight.tokens.map((name, token) => [name, row[token], cells[token]]).filter(([, , cell]) => cell < 0);
    const best = sight.tokens.map((name, token) => [name, row[token], cells[token]]).filter(([, , cell]) => cell >= 0).sort((a, b) => b[1] - a[1])[0];
    readout.textContent = [best, ...others.slice(0, 5)].map(([name, weight]) => `${name} ${number(weight, 2)}`).join("  ·  ");
  };
  const find = (event) => {
    const box = picture.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / across), row = Math.floor((event.clientY - box.top) / down);
    return row >= 0 && row < rows && column >= 0 && column < columns ? place.get(row * columns + column) : -1;
  };
  const listen = (keep, show) => {
    picture.addEventListener("pointermove", (event) => show(find(event)));
    picture.addEventListener("pointerleave", () => show(state.token));
    picture.addEventListener("click", (event) => keep(find(event)));
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (step) {
        event.preventDefault();
        const cell = Math.max(0, cells[now] ?? 0), row = Math.floor(cell / columns) + step[0], column = (cell % columns) + step[1];
        if (row >= 0 && row < rows && column >= 0 && column < columns) show(place.get(row * columns + column));
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        keep(now);
      }
    });
  };
  const name = `${head} ${store.heads.get(head)?.role ?? ""}`;
  return { draw, listen, node: el("figure", {}, el("figcaption", {}, el("strong", { style: { color: color } }, name)), el("div", { class: "heat" }, picture), readout) };
}

// Mean attention over all patches.
function meanOfPatches(sight, head) {
  const made = new Float32Array(sight.n), patches = sight.image.cells.map((cell, token) => [cell, token]).filter(([cell]) => cell >= 0);
  for (const [, token] of patches) sight.row(head, token, false, state.value_weighted).forEach((weight, j) => { made[j] += weight / patches.length; });
  return made;
}
