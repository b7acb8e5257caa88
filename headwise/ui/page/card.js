// View of one head: roles with evidence, idle pattern, attention examples, output, similar heads, importance and cost.

import { el, section, choice, tools, press, grid, number, signed } from "./dom.js";
import { state, change } from "./state.js";
import { store, openSentence, bestHeads, describeRole, describeIdle } from "./report.js";
import { roleMark } from "./color.js";
import { word, whence } from "./glossary.js";
import { offsetChart, lineChart } from "./chart.js";
import { heatMap } from "./heat.js";
import { silenceButton } from "./live.js";
import { costSection } from "./plan.js";
import { overPicture } from "./patches.js";

export async function card(root) {
  const head = store.heads.get(state.head) ?? store.heads.get(bestHeads(1)[0]);
  const sight = await openSentence(state.sentence);
  root.append(
    tools(headChoice("head", head.address, (address) => change({ head: address })), ...neighbours(head),
      press(store.report.metadata.image_grid ? "Show on image" : "Show on sentence", () => change({ view: "sentence", head: head.address, heads: head.address })),
      press("Compare", () => change({ view: "compare", head: head.address })),
      store.live && !store.report.metadata.image_grid && silenceButton(head.address)),
    el("div", { class: "cards" }, [role(head), plainly(head), casesOf(head), distances(head), looking(head), await picture_(head, sight), ovSection(head), similarHeads(head), importanceSection(head), costSection(head), life(head), metrics(head), runnersUp(head)].filter(Boolean)));
}

// An input for an address: shorter than a list of a thousand heads.
export function headChoice(label, value, act) {
  const read = (event) => { if (store.heads.has(event.target.value.trim())) act(event.target.value.trim()); else event.target.value = value; };
  return el("label", { class: "choice" }, el("span", {}, label), el("input", { size: "8", value, "data-key": label, onchange: read }));
}

function neighbours(head) {
  const all = store.report.heads.map((one) => one.address), at = all.indexOf(head.address);
  return [["← previous", at - 1], ["next →", at + 1]].map(([label, to]) => press(label, () => change({ head: all[to] }), { disabled: all[to] === undefined }));
}

function control(head) {
  const one = head.evidence.find((some) => some.role === head.role);
  if (!one || (one.cost ?? null) === null) return null;
  return (one.control_cost ?? null) === null ? "no control cases with the same answers were found"
    : `${signed(one.cost, 3)} nats per answer, ${signed(one.control_cost, 3)} on the same answers in control cases`;
}

// Token sets or prompts on which the causal test of a role passed.
function causalOn(one) {
  return (one?.causal_on ?? []).join(" and ");
}

function role(head) {
  const facts = [
    ["evaluated on", head.corpus_label || null], ["evidence", head.evidence_level], ["score", head.score], ["baseline", head.baseline],
    ["95% CI", head.interval && `${number(head.interval[0], 2)} to ${number(head.interval[1], 2)}`],
    ["effect", head.effect === null ? null : `${signed(head.effect, 3)} nats per answer relative to the other heads of its layer`],
    ["control", control(head)],
    ["causal on", causalOn(head.evidence.find((one) => one.role === head.role)) || null],
    ["idle pattern", describeIdle(head) || "none"],
  ].filter(([, value]) => value !== null && value !== undefined);
  return section(`Head ${head.address}`,
    el("p", { class: "big" }, (head.roles.length ? head.roles : ["unclear"]).slice(0, 4).map(roleMark), " ", el("span", { "data-fact": "role" }, describeRole(head))),
    head.roles?.length > 1 && el("p", { "data-fact": "roles" }, `Also: ${head.evidence.filter((one) => one.role !== head.role && head.roles.includes(one.role)).map((one) => `${one.role} ${one.detail} ${number(one.score, 2)}`).join(", ")}.`),
    el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, word(name)),
      typeof value === "number" ? el("dd", { "data-fact": name, "data-value": value }, number(value, 3)) : el("dd", { "data-fact": name }, name === "evidence" ? word(value) : value)])),
    head.role === "unclear" && el("p", { class: "note" }, "No role exceeded its baseline by the required margin with p < 0.05 on held-out data."),
    Object.entries(store.report.metadata.skipped ?? {}).map(([name, why]) => el("p", { class: "note", "data-fact": "skipped" }, `Not tested: ${name}. ${why}`)));
}

// The summary in sentences. A button after each sentence opens the glossary entry of its numbers.
function plainly(head) {
  if (!head.summary.length) return null;
  return section("Summary", el("ul", { class: "summary" }, head.summary.map(([about, text]) => el("li", { "data-about": about }, text, " ", whence(about)))));
}

function distances(head) {
  if (!head.offsets.length) return null; // image patches have no offsets
  return section("Attention by distance", offsetChart(head.offsets));
}

const markedText = (given) => given.map(([kind, text]) => (kind ? el("mark", { class: kind }, text) : text));

// Random held-out examples of each role; hits and misses occur in proportion.
function casesOf(head) {
  if (!head.examples?.length) return null;
  const examples = head.examples.flatMap((one) => [
    el("h3", {}, `${one.role} ${one.detail}`.trim(), el("small", {}, `, ${one.corpus_label}: ${one.examples.filter((x) => x.hit).length} of ${one.examples.length} examples are hits`)),
    ...one.examples.map((x) => el("p", { class: `context ${x.hit ? "hit" : "miss"}` }, el("span", { class: "weight" }, `${x.hit ? "✓" : "✗"} ${number(x.weight, 2)}`), markedText(x.segments))),
  ]);
  return section("Examples of its roles", el("p", { class: "note" }, el("mark", { class: "token" }, "query"), ", ", el("mark", { class: "attended" }, "key with the largest weight"), ", ",
    el("mark", { class: "meant" }, "target of the role"), "; the number is the weight on the target. Random sample of held-out texts."), examples);
}

function looking(head) {
  const shown = head.top_contexts.map((seen) => el("p", { class: "context" }, el("span", { class: "weight" }, number(seen.weight, 2)), markedText(seen.segments)));
  return section("Largest attention weights", el("p", { class: "note" }, el("mark", { class: "token" }, "query"), " and ", el("mark", { class: "attended" }, "key"), ", regardless of role"),
    shown.length ? shown : el("p", { class: "note" }, "None: all attention follows the idle pattern."));
}

async function picture_(head, sight) {
  if (!sight?.has(head.address)) return null;
  if (sight.image) return overPicture(sight, [head.address]);
  return section("Attention map", heatMap({ weights: sight.map(head.address), labels: sight.tokens, name: `Attention of head ${head.address}`, most: 256, under: sight.under(head.address) }));
}

function ovSection(head) {
  if (!head.ov) return null;
  const { copying, random_std: spread, token_effects: words, effect } = head.ov;
  return section("Output",
    el("dl", { class: "facts" },
      effect && [el("dt", {}, word("direct effect")), el("dd", { "data-fact": "direct effect", "data-value": effect.mean }, `${number(effect.mean, 2)} logits on the attended token (${number(effect.low, 2)} to ${number(effect.high, 2)})`)],
      el("dt", {}, word("OV eigenvalue score")), el("dd", { "data-fact": "OV eigenvalue score", "data-value": copying }, `${number(copying, 2)} (random weights: 0 ± ${number(spread, 3)})`)),
    words.length > 0 && grid("Promoted and suppressed tokens, computed from the embedding of the attended token", ["attended token", "promotes", "suppresses"],
      words.map((one) => [one.token, one.promotes.map(([word]) => word.trim() || "␣").join("  "), one.suppresses.map(([word]) => word.trim() || "␣").join("  ")])));
}

function similarHeads(head) {
  if (!head.similar_heads.length) return null;
  return section("Similar heads", grid("Jensen–Shannon divergence of attention rows, in nats; 0 is identical", ["head", "role", "divergence", ""],
    head.similar_heads.map(([address, apart]) => [address, store.heads.get(address)?.role ?? "", [apart, 3],
      press("compare", () => change({ view: "compare", head: head.address, other: address }), { class: "small", "data-key": `compare ${address}` })])));
}

function importanceSection(head) {
  if (!head.importance) return null;
  const { importance: mean, low, high, above_layer: above, above_low: least, above_high: most } = head.importance, about = store.report.importance;
  return section("Importance",
    el("dl", { class: "facts" },
      el("dt", {}, word(`importance (${about.metric})`, "importance")), el("dd", { "data-fact": "importance", "data-value": mean }, `${number(mean, 4)} (95% CI ${number(low, 4)} to ${number(high, 4)})`),
      el("dt", {}, "relative to layer"), el("dd", {}, `${number(above, 4)} (95% CI ${number(least, 4)} to ${number(most, 4)})`)),
    el("p", { class: "note" }, `Computed by ${about.ranking === "ablation" ? `${about.ablation} ablation` : about.ranking} on ${about.texts} texts. “Relative to layer” is the difference to the mean of the other heads of the layer. Later heads may compensate in part.`));
}

function life(head) {
  const about = store.report.history;
  if (!about || !head.history) return null;
  const box = el("div", {});
  const show = (name) => {
    const values = head.history[about.metrics.indexOf(name)];
    box.replaceChildren(lineChart({ title: name, x: "step", y: name, series: [{ name: head.address, points: values.map((value, i) => [about.steps[i], value]) }] }));
  };
  const first = about.metrics.includes(head.role) ? head.role : about.metrics.includes("induction") ? "induction" : about.metrics[0];
  show(first);
  return section("Training history", choice("metric", about.metrics.map((name) => [name, name]), first, show), box);
}

// The name of a metric, with a tooltip for label and unit.
function named(name) {
  const spec = store.report.metrics?.[name];
  if (store.report.glossary?.[name]) return word(name);
  return spec ? el("span", { title: [spec.label, spec.unit, spec.more && `high: ${spec.more}`].filter(Boolean).join("; ") }, name) : name;
}

function metrics(head) {
  return section("Metrics", grid(`Means over ${store.report.metadata.texts} texts`, ["metric", "value"], Object.entries(head.metrics).map(([name, value]) => [named(name), [value, 4]])));
}

function runnersUp(head) {
  if (!head.evidence.length) return null;
  const apart = head.evidence.find((one) => one.family_size)?.family_size; // roles on prompts are a separate family of tests
  return el("section", { class: "wide", "aria-label": "Evidence" }, el("h2", {}, "Evidence for each role"),
    grid(`p-values are corrected for ${number(store.report.metadata.family_size)} tests${apart ? `; for roles on prompts, ${number(apart)} tests` : ""}`, ["role", "", "evaluated on", "evidence", "score", "baseline", "95% CI", "p", "cases", "coverage", "effect", "cost", "control", "causal on"].map((name) => word(name)),
      head.evidence.map((one) => [word(one.role), one.detail, one.corpus_label ?? "", one.evidence_level, [one.score, 2], [one.baseline, 2], `${number(one.interval[0], 2)}–${number(one.interval[1], 2)}`, [one.p, 4], one.rows, [one.coverage, 2], ...[one.effect, one.cost, one.control_cost].map((some) => (some === null ? "" : [some, 3])), causalOn(one)])));
}
