// Features that require a live server: other texts, silenced heads, generation, explanations. Hidden in a report.

import { el, section, press, visible, say } from "./dom.js";
import { state, change } from "./state.js";
import { ask, addSentence, chosenHeads, store } from "./report.js";
import { barList } from "./chart.js";
import { CHOSEN, ramp, shade } from "./color.js";

const OFFERED = [
  "The animal didn't cross the street because it was too tired", "The cat sat on the mat because it was soft",
  "The teacher gave the students their homework", "The cat sat on the",
];
const silenced = new Set();
const strengths = new Map(); // strength of each steering that was moved, by name
const continued = { key: "", plain: "", steered: "" };
const written = { text: "", tokens: [], steps: [] };

export function silenceButton(head) {
  const off = silenced.has(head);
  return press(off ? "Enable head" : "Silence head", () => {
    if (off) silenced.delete(head);
    else silenced.add(head);
    say(`Head ${head} is ${off ? "enabled" : "silenced"}.`);
    change({});
  }, { "aria-pressed": String(off), "data-key": "silence" });
}

export function livePanel() {
  const text = store.sentences[state.sentence]?.given.text ?? OFFERED[0];
  const box = el("textarea", { rows: "2", id: "live-text", "aria-label": "Text to analyze", value: text,
    onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); look(box.value); } } });
  const offers = OFFERED.map((offer) => press(offer, () => look(offer), { class: "small" }));
  return section("Live", box, el("div", { class: "chips tools" }, press("Run", () => look(box.value)), offers),
    (store.report.model.output ?? "lm") !== "none" && predictions(text),
    (store.report.steerings ?? []).length > 0 && (store.report.model.kind ?? "decoder") === "decoder" && steeringPanel(text));
}

async function look(text) {
  if (!text.trim()) return say("Enter a text.");
  say("Running the model …");
  await trying(async () => {
    const place = addSentence(await ask("api/sentence", { text }));
    change({ sentence: place, token: -1, pin: "" });
    say("");
  });
}

// A request with the silenced heads and, if a slider was moved, the strengths.
function edited(text) {
  const steering = strengths.size ? { steering: Object.fromEntries(strengths) } : {};
  return { text, silenced: [...silenced], ...steering };
}

// One slider per steering. The continuation is computed again when a slider has rested for a moment.
function steeringPanel(text) {
  const plain = el("p", { class: "context" }), steered = el("p", { class: "context", "aria-live": "polite" });
  const key = JSON.stringify([text, [...silenced]]);
  let timer = 0, asked = 0;
  const show = () => { plain.textContent = continued.plain.trimStart(); steered.textContent = continued.steered.trimStart(); };
  const run = () => trying(async () => {
    const request = ++asked;
    steered.setAttribute("aria-busy", "true");
    try {
      if (continued.key !== key) Object.assign(continued, { key, plain: (await ask("api/continue", { text, silenced: [...silenced] })).text, steered: "" });
      const moved = [...strengths.values()].some((strength) => strength !== 0);
      const added = moved ? (await ask("api/continue", edited(text))).text : continued.plain;
      if (request === asked) { continued.steered = added; show(); }
    } finally {
      if (request === asked) steered.removeAttribute("aria-busy");
    }
  });
  const sliders = store.report.steerings.map(({ name, strength, heads, edit }, place) => {
    const limit = edit === "shift" ? 2 * Math.abs(strength) || 2 : 1, value = el("output", {}, (strengths.get(name) ?? 0).toFixed(2));
    const slider = el("input", { type: "range", id: `steering-${place}`, min: String(edit === "shift" ? -limit : 0), max: String(limit), step: String(edit === "shift" ? limit / 20 : 1),
      value: String(strengths.get(name) ?? 0), "data-key": `steering ${name}`, oninput: (event) => {
        strengths.set(name, Number(event.target.value));
        value.textContent = Number(event.target.value).toFixed(2);
        clearTimeout(timer);
        timer = setTimeout(run, 250);
      } });
    return el("div", { class: "slider" }, el("label", { for: `steering-${place}` }, name), slider, value,
      el("span", { class: "note" }, `${heads.length} head${heads.length > 1 ? "s" : ""}: ${heads.slice(0, 6).join(", ")}${heads.length > 6 ? " …" : ""}`));
  });
  if (continued.key === key) show();
  return el("div", { class: "steering", id: "steering" }, el("h3", {}, "Steering"), sliders,
    el("div", { class: "chips tools" }, press("Continue text", run)),
    el("div", { class: "before-after" }, el("div", {}, el("h3", {}, "Plain"), plain), el("div", {}, el("h3", {}, "Steered"), steered)));
}

// Silenced heads, predictions with and without them, and generation.
function predictions(text) {
  const chips = [...silenced].map((head) => el("span", { class: "chip" }, `${head} silenced`, el("button", { type: "button", "aria-label": `Enable ${head}`, onclick: () => { silenced.delete(head); change({}); } }, "×")));
  const add = el("input", { size: "9", placeholder: "5.1", "data-key": "silence head", "aria-label": "Silence a head", onchange: (event) => {
    const head = event.target.value.trim();
    if (store.heads.has(head)) { silenced.add(head); change({}); } else if (head) say(`${head}: no such head. Use an address such as 5.1.`);
  } });
  const outcome = el("div", { class: "before-after", id: "outcome" }), steps = el("div", { id: "steps" });
  const predict = () => trying(async () => {
    const { before, after } = await ask("api/predict", edited(text));
    outcome.replaceChildren(predictionList("With all heads", before), predictionList(silenced.size ? `Without ${[...silenced].join(", ")}` : "No head is silenced", after));
  });
  if (silenced.size) predict();
  if (written.text.startsWith(text) && written.steps.length) showSteps(steps);
  return el("div", {},
    el("div", { class: "chips tools", role: "group", "aria-label": "Silenced heads" }, el("span", { class: "note" }, "silenced heads:"), chips.length ? chips : el("span", { class: "note" }, "none"), add,
      press("Predict", predict), (store.report.model.kind ?? "decoder") === "decoder" && press("Next token", () => step(text, steps))), outcome, steps);
}

function predictionList(title, pairs) {
  return el("div", {}, el("h3", {}, title), barList(pairs.map(([word, p]) => [visible(word), p]), 3, true));
}

async function step(text, box) {
  const sight = await store.sentences[state.sentence].sight;
  if (!written.text.startsWith(text) || written.steps.length === 0) Object.assign(written, { text, tokens: [...sight.tokens], steps: [] });
  await trying(async () => {
    const made = await ask("api/step", edited(written.text));
    written.steps.push({ token: made.token, rows: made.rows, tokens: made.tokens ?? [...written.tokens] });
    Object.assign(written, { text: made.text, tokens: [...written.tokens, made.token] });
    showSteps(box, chosenHeads(sight));
  });
}

// For each generated token, the attention of each chosen head from the last token.
function showSteps(box, heads = [...Object.keys(written.steps[0].rows)].slice(0, 4)) {
  const colors = ramp();
  box.replaceChildren(el("p", { class: "context" }, written.text), ...written.steps.slice(-6).reverse().map((one) => el("div", {}, el("h3", {}, `“${visible(one.token)}”`),
    heads.filter((head) => one.rows[head]).map((head, place) => el("div", { class: "strip" }, el("div", { class: "tokens", role: "img", "aria-label": `Attention of ${head}` },
      el("span", { class: "chip", style: { "--chip": CHOSEN[place] } }, head),
      one.rows[head].map((weight, j) => el("span", { title: weight.toFixed(3), style: { background: shade(weight, colors), color: dark(weight, colors) ? "#fff" : "#000", padding: "0 4px", "border-radius": "3px" } }, visible(one.tokens[j] ?? "·")))))))));
}

function dark(weight, colors) {
  const [r, g, b] = colors[Math.round(Math.sqrt(Math.min(1, Math.max(0, weight))) * 255)];
  return r * 0.3 + g * 0.6 + b * 0.1 < 140;
}

// Explain one attention score: pairs of residual-stream components at query and key, relative to the mean over all visible keys.
export function explainPanel(text, head, at, to, labels, words) {
  const box = el("div", { "aria-live": "polite" });
  const run = () => trying(async () => {
    say("Computing the explanation …");
    const made = await ask("api/explain", { text, head, query: at, key: to, words });
    const path = (side) => made.path.filter((one) => one.side === side).map((one) => `${one.part} at “${visible(one.token)}”` + (one.source_token === null ? "" : ` (from “${visible(one.source_token)}”)`)).join(" ← ");
    box.replaceChildren(
      el("p", { class: "note" }, `The attention score is ${Math.abs(made.score).toFixed(2)} ${made.score < 0 ? "below" : "above"} the mean over all keys visible to “${labels[at]}”. It is a sum over pairs of a component at the query “${labels[at]}” and a component at the key “${labels[to]}”. The largest pairs:`),
      barList(made.pairs.map((one) => [`${one.query} · ${one.key}`, one.score])),
      el("p", { class: "note" }, `Origin of the first pair. At “${labels[at]}”: ${path("query")}. At “${labels[to]}”: ${path("key")}.`));
    say("");
  });
  return el("div", { class: "stack" }, press(`Why does “${labels[at]}” attend to “${labels[to]}”?`, run, { "data-key": "explain" }), box);
}

async function trying(work) {
  try {
    await work();
  } catch (error) {
    say(`Request failed: ${error.message}`);
  }
}
