// A picture as heads saw it: what each looks at from one patch, from another token, or from all patches on average.

import { el, canvas, section, number } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./report.js";
import { CHOSEN, ink } from "./color.js";

const PANEL = 260, EVEN = 4; // a head that looks at all alike stays faint: full color is four times an even share at least

// The picture once for each head, weights laid over it; a press on a patch asks from there.
export async function overPicture(sight, heads) {
  const image = new Image();
  image.src = `data:image/png;base64,${sight.image.png}`;
  await image.decode();
  const panels = heads.map((head, place) => patchPanel(sight, image, head, CHOSEN[place]));
  const asked = el("p", { class: "readout", "aria-live": "polite" });
  const buttons = [[-1, "all patches"], ...sight.tokens.map((name, i) => [i, name]).filter(([i]) => sight.image.cells[i] < 0)]
    .map(([i, name]) => el("button", { type: "button", class: "small", "data-token": i, onclick: () => from(i) }, name));
  const show = (at) => {
    for (const one of panels) one.draw(at);
    asked.textContent = at < 0 ? "Looking: all patches, on average." : `Looking: ${sight.tokens[at]}.`;
    for (const button of buttons) button.setAttribute("aria-pressed", String(Number(button.dataset.token) === at));
  };
  const from = (at) => { change({ token: at === state.token ? -1 : at }, true); show(state.token); };
  for (const one of panels) one.listen(from, show);
  show(state.token < sight.n ? state.token : -1);
  return section("The picture, and where each head looks",
    el("div", { class: "tools" }, buttons), asked,
    el("div", { class: "over" }, panels.map((one) => one.node)),
    el("p", { class: "note" }, "Point at a patch to see where each head looks from it; press to keep it. The stronger the color the more weight: full color is the largest weight of the head, or four even shares where that is more. What goes to tokens that are no patches stands below."));
}

function patchPanel(sight, image, head, color) {
  const { rows, columns, cells } = sight.image;
  const wide = Math.min(PANEL, globalThis.innerWidth - 70), high = Math.round((wide * image.height) / image.width);
  const [picture, pen] = canvas(wide, high, { tabindex: "0", role: "img", "data-head": head,
    "aria-label": `Head ${head} over the picture, ${rows} rows of ${columns} patches. Arrow keys move, Enter keeps a patch.` });
  const told = el("p", { class: "readout" });
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
    told.textContent = [best, ...others.slice(0, 5)].map(([name, weight]) => `${name} ${number(weight, 2)}`).join("  ·  ");
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
  return { draw, listen, node: el("figure", {}, el("figcaption", {}, el("strong", { style: { color: color } }, name)), el("div", { class: "heat" }, picture), told) };
}

// From all patches, on average.
function meanOfPatches(sight, head) {
  const made = new Float32Array(sight.n), patches = sight.image.cells.map((cell, token) => [cell, token]).filter(([cell]) => cell >= 0);
  for (const [, token] of patches) sight.row(head, token, false, state.value_weighted).forEach((weight, j) => { made[j] += weight / patches.length; });
  return made;
}
