// Relations: accuracy of every head, compared with the best fixed offset.

import { el, section, choice, press, grid, canvas, number } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./report.js";
import { ink } from "./color.js";

export async function relations(root) {
  const found = store.report.relations;
  if (!found) return root.append(el("p", { class: "note" }, "No relations: the profile was computed without annotated documents, or with too few."));
  const chosen = found.rows.find((row) => row.relation === state.relation) ?? found.rows[0];
  root.append(el("div", { class: "stack" },
    section("The best head for each relation", el("p", { class: "note" }, "Head, direction and offset were selected on one half of the texts; the numbers are from the other half. > is attention from the first word of a gold arc to the second, < from the second to the first; docs/gold-sets.md defines the words of each relation."),
      grid("Accuracy: share of arcs whose target gets the largest weight", ["relation", "", "arcs", "best head", "accuracy", "95% CI", "best offset", "offset accuracy", "excess weight", "p"],
        found.rows.map((row) => [row.relation, row.direction, row.arcs, press(row.head, () => change({ view: "card", head: row.head }), { class: "small", "data-key": `${row.relation} ${row.head}` }), [row.accuracy, 2],
          `${number(row.low, 2)}–${number(row.high, 2)}`, row.offset > 0 ? `+${row.offset}` : String(row.offset), [row.offset_accuracy, 2], [row.excess, 3], [row.p, 4]]), { "data-table": "relations" })),
    section("Heads × relations", el("p", { class: "note" }, "Blue: above the best fixed offset; red: below. One column per head, ordered by layer."), matrix(found)),
    section("One relation", el("div", { class: "tools" }, choice("relation", found.rows.map((row) => [row.relation, `${row.relation} ${row.direction}`]), chosen.relation, (relation) => change({ relation }))),
      strongest(found, chosen))));
}

function matrix(found) {
  const heads = found.heads.length, left = 150, room = Math.max(420, Math.min(1500, document.getElementById("main").clientWidth - 90) - left);
  const wide = Math.max(1.4, Math.min(16, room / heads)), high = 18, top = 20;
  const [picture, pen] = canvas(left + heads * wide + 2, top + found.rows.length * high + 2, { role: "img", tabindex: "0", "aria-label": `${found.rows.length} relations by ${heads} heads; the table below has the numbers.` });
  const readout = el("p", { class: "readout" }, "Hover over a cell.");
  const draw = (at) => {
    pen.clearRect(0, 0, left + heads * wide + 2, top + found.rows.length * high + 2);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    found.rows.forEach((row, y) => {
      pen.fillStyle = ink(at?.[0] === y ? "text" : "soft");
      pen.textAlign = "right";
      pen.fillText(`${row.relation} ${row.direction}`, left - 6, top + (y + 0.5) * high);
      row.scores.forEach((score, x) => {
        const gain = (score ?? 0) - row.offset_accuracy;
        pen.fillStyle = gain >= 0 ? `rgb(36 89 179 / ${Math.min(1, 0.04 + gain * 1.3)})` : `rgb(179 38 30 / ${Math.min(0.8, -gain * 0.6)})`;
        pen.fillRect(left + x * wide, top + y * high + 1, Math.max(1, wide - 0.4), high - 2);
      });
    });
    pen.fillStyle = ink("soft");
    pen.textAlign = "left";
    let last = -99;
    found.heads.forEach((head, x) => {
      const layer = head.split(".").slice(0, -1).join(".");
      const starts = x === 0 || found.heads[x - 1].split(".").slice(0, -1).join(".") !== layer;
      if (starts) {
        pen.fillRect(left + x * wide, top - 4, 1, found.rows.length * high + 6);
        if ((x - last) * wide > 26) { pen.fillText(layer, left + x * wide + 3, top - 10); last = x; }
      }
    });
    if (at) { pen.strokeStyle = ink("focus"); pen.strokeRect(left + at[1] * wide - 0.5, top + at[0] * high, wide + 1, high); }
  };
  const find = (event) => {
    const box = picture.getBoundingClientRect(), y = Math.floor((event.clientY - box.top - top) / high), x = Math.floor((event.clientX - box.left - left) / wide);
    return y >= 0 && y < found.rows.length && x >= 0 && x < heads ? [y, x] : null;
  };
  picture.addEventListener("pointermove", (event) => {
    const at = find(event);
    draw(at);
    if (at) readout.textContent = `${found.heads[at[1]]}: ${found.rows[at[0]].relation} ${number(found.rows[at[0]].scores[at[1]], 3)}, best offset ${number(found.rows[at[0]].offset_accuracy, 3)}`;
  });
  picture.addEventListener("click", (event) => { const at = find(event); if (at) change({ view: "card", head: found.heads[at[1]] }); });
  draw(null);
  return el("div", {}, el("div", { class: "heat" }, picture), readout);
}

function strongest(found, row) {
  const ordered = row.scores.map((score, i) => [found.heads[i], score]).filter(([, score]) => score !== null).sort((a, b) => b[1] - a[1]).slice(0, 20);
  return grid(`The 20 best heads; best fixed offset ${row.offset}: ${number(row.offset_accuracy, 2)}`, ["head", "role", "accuracy", "minus offset accuracy"],
    ordered.map(([head, score]) => [head, store.heads.get(head)?.role ?? "", [score, 3], [score - row.offset_accuracy, 3]]), { "data-table": "relation" });
}
