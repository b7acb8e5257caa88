// Compare two heads, or one head in two reports.

import { el, section, choice, tools, grid, number, signed, say, brief } from "./dom.js";
import { state, change } from "./state.js";
import { store, openSentence, openOther, bestHeads, describeRole, describeIdle } from "./report.js";
import { headChoice } from "./card.js";
import { heatMap } from "./heat.js";
import { offsetChart } from "./chart.js";
import { CHOSEN } from "./color.js";

export async function compare(root) {
  const sight = await openSentence(state.sentence);
  const one = store.heads.get(state.head) ?? store.heads.get(bestHeads(1)[0]);
  const elsewhere = store.other?.heads.get(one.address);
  const usual = one.similar_heads[0]?.[0] ?? bestHeads(2).find((head) => head !== one.address) ?? one.address;
  const two = store.other ? elsewhere : store.heads.get(state.other) ?? store.heads.get(usual);
  root.append(
    tools(
      headChoice("head", one.address, (head) => change({ head })),
      !store.other && headChoice("compare with", two.address, (other) => change({ other })),
      el("label", { class: "choice" }, el("span", {}, "or with this head in another report"), el("input", { type: "file", accept: ".html,.json", "data-key": "other report", onchange: read })),
      store.sentences.length > 0 && choice("sentence", store.sentences.map((s, i) => [i, brief(s.given.text, 50)]), state.sentence, (place) => change({ sentence: Number(place) }))));
  if (!two) return root.append(el("p", { class: "note" }, `${store.other.name} has no head ${one.address}.`));
  const names = store.other ? [`${one.address} here`, `${two.address} in ${store.other.name}`] : [one.address, two.address];
  root.append(el("div", { class: "stack" }, said(one, two, names), maps(sight, one, two, names), both(one, two, names)));
}

async function read(event) {
  const [file] = event.target.files;
  if (!file) return;
  try {
    await openOther(file);
    change({});
  } catch (error) {
    say(error.message);
  }
}

function said(one, two, names) {
  const line = (name, tell) => [name, tell(one), tell(two)];
  return section("Roles and evidence", grid("Roles", ["", ...names], [
    line("role", describeRole), line("evaluated on", (head) => head.corpus_label), line("evidence", (head) => head.evidence_level), line("score", (head) => [head.score, 3]), line("baseline", (head) => [head.baseline, 3]),
    line("95% CI", (head) => (head.interval ? `${number(head.interval[0], 2)} to ${number(head.interval[1], 2)}` : "–")), line("idle pattern", (head) => describeIdle(head) || "none"),
    line("importance", (head) => [head.importance?.importance ?? null, 4]),
  ]));
}

function maps(sight, one, two, names) {
  if (store.other || !sight?.has(one.address) || !sight.has(two.address)) return null;
  const found = [one, two].map((head) => sight.map(head.address, false, state.value_weighted));
  const apart = sight.full ? `Jensen–Shannon divergence on this sentence: ${number(divergence(...found, sight.n), 3)} nats per row (0: identical, 0.693: disjoint).` : "";
  return section("Attention maps", el("div", { class: "pair" }, found.map((weights, i) => el("div", {}, el("h3", {}, names[i]),
    heatMap({ weights, labels: sight.tokens, name: `Attention of ${names[i]}`, most: 420, under: sight.under([one, two][i].address) })))), apart && el("p", { class: "note" }, apart));
}

// The mean over rows of H((p+q)/2) − (H(p)+H(q))/2.
function divergence(p, q, n) {
  const part = (x) => (x > 0 ? x * Math.log(x) : 0);
  let sum = 0;
  for (let at = 0; at < n * n; at++) sum += (part(p[at]) + part(q[at])) / 2 - part((p[at] + q[at]) / 2);
  return sum / n;
}

function both(one, two, names) {
  const keys = Object.keys(one.metrics).filter((name) => Number.isFinite(two.metrics[name]));
  return el("div", { class: "pair" },
    section("Attention by distance", el("div", { class: "chips" }, names.map((name, i) => el("span", { class: "chip", style: { "--chip": CHOSEN[i] } }, name))), offsetChart(one.offsets, two.offsets)),
    section("Metrics", grid("Means over the texts", ["metric", ...names, "difference"], keys.map((name) =>
      [name, [one.metrics[name], 4], [two.metrics[name], 4], signed(two.metrics[name] - one.metrics[name], 4)]))));
}
