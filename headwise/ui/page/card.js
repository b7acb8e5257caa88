// One head: what it does and how sure that is, where it rests, what it looks at, what it writes, whom it resembles.

import { el, section, choice, tools, press, grid, number, signed } from "./dom.js";
import { state, change } from "./state.js";
import { store, openSentence, bestHeads, describeRole } from "./book.js";
import { roleMark } from "./colour.js";
import { word, whence } from "./words.js";
import { offsetChart, lineChart } from "./chart.js";
import { heatMap } from "./heat.js";
import { silenceButton } from "./live.js";
import { price } from "./plan.js";
import { overPicture } from "./patches.js";

export async function card(root) {
  const head = store.heads.get(state.head) ?? store.heads.get(bestHeads(1)[0]);
  const sight = await openSentence(state.sentence);
  root.append(
    tools(headChoice("head", head.address, (address) => change({ head: address })), ...neighbours(head),
      press(store.book.about.pictures ? "On the picture" : "On the sentence", () => change({ view: "sentence", head: head.address, heads: head.address })),
      press("Compare", () => change({ view: "compare", head: head.address })),
      store.live && !store.book.about.pictures && silenceButton(head.address)),
    el("div", { class: "cards" }, [role(head), plainly(head), casesOf(head), distances(head), looking(head), await picture_(head, sight), writes(head), nearest(head), worth(head), price(head), life(head), measures(head), runnersUp(head)].filter(Boolean)));
}

// An input that takes an address: shorter than a list of a thousand heads.
export function headChoice(label, value, act) {
  const read = (event) => { if (store.heads.has(event.target.value.trim())) act(event.target.value.trim()); else event.target.value = value; };
  return el("label", { class: "choice" }, el("span", {}, label), el("input", { size: "8", value, "data-key": label, onchange: read }));
}

function neighbours(head) {
  const all = store.book.heads.map((one) => one.address), at = all.indexOf(head.address);
  return [["← previous", at - 1], ["next →", at + 1]].map(([label, to]) => press(label, () => change({ head: all[to] }), { disabled: all[to] === undefined }));
}

function control(head) {
  const one = head.supports.find((some) => some.role === head.role);
  if (!one || (one.cost ?? null) === null) return null;
  return (one.control ?? null) === null ? "the same answers were nowhere found reached another way"
    : `${signed(one.cost, 3)} nats, and ${signed(one.control, 3)} where the same answers are reached another way`;
}

// Token sets, or prompts, on which the causal test of a role holds.
function causalOn(one) {
  return (one?.causal_on ?? []).join(" and ");
}

function role(head) {
  const facts = [
    ["shown on", head.on || null], ["evidence", head.rung], ["score", head.score], ["baseline", head.null],
    ["95 % CI", head.interval && `${number(head.interval[0], 2)} to ${number(head.interval[1], 2)}`],
    ["effect", head.effect === null ? null : `${signed(head.effect, 3)} nats more than without others of its layer`],
    ["control", control(head)],
    ["causal on", causalOn(head.supports.find((one) => one.role === head.role)) || null],
    ["rests", head.rest.join(", ") || "no"],
  ].filter(([, value]) => value !== null && value !== undefined);
  return section(`Head ${head.address}`,
    el("p", { class: "big" }, (head.roles.length ? head.roles : ["unclear"]).slice(0, 4).map(roleMark), " ", el("span", { "data-fact": "role" }, describeRole(head))),
    head.roles?.length > 1 && el("p", { "data-fact": "roles" }, `Also: ${head.supports.filter((one) => one.role !== head.role && head.roles.includes(one.role)).map((one) => `${one.role} ${one.detail} ${number(one.score, 2)}`).join(", ")}.`),
    el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, word(name)),
      typeof value === "number" ? el("dd", { "data-fact": name, "data-value": value }, number(value, 3)) : el("dd", { "data-fact": name }, name === "evidence" ? word(value) : value)])),
    head.role === "unclear" && el("p", { class: "note" }, "No role of it stood above its baseline by the margin of the role, with p < 0.05, on text it was not chosen on."),
    Object.entries(store.book.about.unasked ?? {}).map(([name, why]) => el("p", { class: "note", "data-fact": "unasked" }, `Not asked for ${name}: ${why}`)));
}

// The same in plain sentences; behind each a sign that says how its numbers are made.
function plainly(head) {
  if (!head.story.length) return null;
  return section("In plain words", el("ul", { class: "story" }, head.story.map(([about, text]) => el("li", { "data-about": about }, text, " ", whence(about)))));
}

function distances(head) {
  if (!head.offsets.length) return null; // patches have no offsets
  return section("Weight by distance", offsetChart(head.offsets));
}

const markedText = (given) => given.map(([kind, text]) => (kind ? el("mark", { class: kind }, text) : text));

// Cases drawn for each role, from the half for reporting: hits and misses as often as they are.
function casesOf(head) {
  if (!head.cases?.length) return null;
  const told = head.cases.flatMap((one) => [
    el("h3", {}, `${one.role} ${one.detail}`.trim(), el("small", {}, `, ${one.on}: ${one.examples.filter((x) => x.hit).length} of ${one.examples.length} shown are hits`)),
    ...one.examples.map((x) => el("p", { class: `context ${x.hit ? "hit" : "miss"}` }, el("span", { class: "weight" }, `${x.hit ? "✓" : "✗"} ${number(x.weight, 2)}`), markedText(x.parts))),
  ]);
  return section("Cases of its roles", el("p", { class: "note" }, el("mark", { class: "token" }, "who looks"), ", ", el("mark", { class: "attended" }, "what it looks at hardest"), ", ",
    el("mark", { class: "meant" }, "what it should look at"), "; the number is the weight on what it should. Drawn by chance from texts the role was not chosen on."), told);
}

function looking(head) {
  const shown = head.hardest.map((seen) => el("p", { class: "context" }, el("span", { class: "weight" }, number(seen.weight, 2)), markedText(seen.parts)));
  return section("Where it looked hardest", el("p", { class: "note" }, el("mark", { class: "token" }, "who looks"), " and ", el("mark", { class: "attended" }, "who is looked at"), ", whatever for"),
    shown.length ? shown : el("p", { class: "note" }, "It only rested."));
}

async function picture_(head, sight) {
  if (!sight?.has(head.address)) return null;
  if (sight.picture) return overPicture(sight, [head.address]);
  return section("On the sentence", heatMap({ weights: sight.map(head.address), labels: sight.tokens, name: `Attention of head ${head.address}`, most: 256, under: sight.under(head.address) }));
}

function writes(head) {
  if (!head.writes) return null;
  const { copying, spread, words, effect } = head.writes;
  return section("What it writes",
    el("dl", { class: "facts" },
      effect && [el("dt", {}, word("direct effect")), el("dd", { "data-fact": "direct effect", "data-value": effect.mean }, `${number(effect.mean, 2)} logits on the attended token (${number(effect.low, 2)} to ${number(effect.high, 2)})`)],
      el("dt", {}, word("OV eigenvalue score")), el("dd", { "data-fact": "OV eigenvalue score", "data-value": copying }, `${number(copying, 2)} (random weights: 0 ± ${number(spread, 3)})`)),
    words.length > 0 && grid("When it looks at a word, by the word's bare embedding", ["looks at", "makes likelier", "makes less likely"],
      words.map((one) => [one.token, one.promotes.map(([word]) => word.trim() || "␣").join("  "), one.suppresses.map(([word]) => word.trim() || "␣").join("  ")])));
}

function nearest(head) {
  if (!head.nearest.length) return null;
  return section("Heads that look alike", grid("Jensen–Shannon divergence of their rows, in nats; 0 is the same", ["head", "role", "apart", ""],
    head.nearest.map(([address, apart]) => [address, store.heads.get(address)?.role ?? "", [apart, 3],
      press("compare", () => change({ view: "compare", head: head.address, other: address }), { class: "small", "data-key": `compare ${address}` })])));
}

function worth(head) {
  if (!head.importance) return null;
  const { worth: mean, low, high, above_layer: above, above_low: least, above_high: most } = head.importance, about = store.book.importance;
  return section("What it is worth",
    el("dl", { class: "facts" },
      el("dt", {}, word(`lost without it (${about.metric})`, "worth")), el("dd", { "data-fact": "worth", "data-value": mean }, `${number(mean, 4)}  (${number(low, 4)} to ${number(high, 4)})`),
      el("dt", {}, "more than others of its layer"), el("dd", {}, `${number(above, 4)}  (${number(least, 4)} to ${number(most, 4)})`)),
    el("p", { class: "note" }, `By ${about.by}${about.by === "ablation" ? `, ${about.how}` : ""}, on ${about.texts} texts. Later heads may take over a part of its work.`));
}

function life(head) {
  const about = store.book.history;
  if (!about || !head.history) return null;
  const box = el("div", {});
  const show = (name) => {
    const values = head.history[about.measures.indexOf(name)];
    box.replaceChildren(lineChart({ title: name, x: "step", y: name, series: [{ name: head.address, points: values.map((value, i) => [about.steps[i], value]) }] }));
  };
  const first = about.measures.includes(head.role) ? head.role : about.measures.includes("induction") ? "induction" : about.measures[0];
  show(first);
  return section("Its life in training", choice("measure", about.measures.map((name) => [name, name]), first, show), box);
}

// A measure's name, with its words and unit where one points at it.
function named(name) {
  const told = store.book.measures?.[name];
  if (store.book.words?.[name]) return word(name);
  return told ? el("span", { title: [told.label, told.unit, told.more && `more: ${told.more}`].filter(Boolean).join("; ") }, name) : name;
}

function measures(head) {
  return section("Measures", grid(`Means over ${store.book.about.texts} texts`, ["measure", "value"], Object.entries(head.measures).map(([name, value]) => [named(name), [value, 4]])));
}

function runnersUp(head) {
  if (!head.supports.length) return null;
  const apart = head.supports.find((one) => one.family)?.family; // roles on prompts of their own are tested apart
  return el("section", { class: "wide", "aria-label": "What speaks for it" }, el("h2", {}, "What speaks for it, and for other roles"),
    grid(`${number(store.book.about.family)} tests in the family${apart ? `, ${number(apart)} in that of prompts` : ""}`, ["role", "", "shown on", "evidence", "score", "baseline", "95 % CI", "p", "cases", "coverage", "effect", "cost", "control", "causal on"].map((name) => word(name)),
      head.supports.map((one) => [word(one.role), one.detail, one.on ?? "", one.rung, [one.score, 2], [one.null, 2], `${number(one.interval[0], 2)}–${number(one.interval[1], 2)}`, [one.p, 4], one.rows, [one.coverage, 2], ...[one.effect, one.cost, one.control].map((some) => (some === null ? "" : [some, 3])), causalOn(one)])));
}
