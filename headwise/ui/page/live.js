// What only a live server can do: read another text, switch heads off, write on word by word. Hidden in a report.

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
const written = { text: "", tokens: [], steps: [] };

export function silenceButton(head) {
  const off = silenced.has(head);
  return press(off ? "Switch it on" : "Switch it off", () => {
    if (off) silenced.delete(head);
    else silenced.add(head);
    say(`${head} is ${off ? "on" : "off"}`);
    change({});
  }, { "aria-pressed": String(off), "data-key": "silence" });
}

export function livePanel() {
  const text = store.sentences[state.sentence]?.given.text ?? OFFERED[0];
  const box = el("textarea", { rows: "2", id: "live-text", "aria-label": "A text to look at", value: text,
    onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); look(box.value); } } });
  const offers = OFFERED.map((offer) => press(offer, () => look(offer), { class: "small" }));
  return section("Live", box, el("div", { class: "chips tools" }, press("Look", () => look(box.value)), offers),
    (store.report.model.output ?? "lm") !== "none" && predictions(text));
}

async function look(text) {
  if (!text.trim()) return say("there is no text");
  say("looking …");
  await trying(async () => {
    const place = addSentence(await ask("api/sentence", { text }));
    change({ sentence: place, token: -1, pin: "" });
    say("");
  });
}

// Heads that are off, the next words before and after, and writing on.
function predictions(text) {
  const chips = [...silenced].map((head) => el("span", { class: "chip" }, `${head} off`, el("button", { type: "button", "aria-label": `Switch ${head} on`, onclick: () => { silenced.delete(head); change({}); } }, "×")));
  const add = el("input", { size: "9", placeholder: "5.1", "data-key": "switch off", "aria-label": "Switch a head off", onchange: (event) => {
    const head = event.target.value.trim();
    if (store.heads.has(head)) { silenced.add(head); change({}); } else if (head) say(`there is no head ${head}`);
  } });
  const outcome = el("div", { class: "before-after", id: "outcome" }), steps = el("div", { id: "steps" });
  const predict = () => trying(async () => {
    const { before, after } = await ask("api/predict", { text, silenced: [...silenced] });
    outcome.replaceChildren(told("With all heads", before), told(silenced.size ? `Without ${[...silenced].join(", ")}` : "The same", after));
  });
  if (silenced.size) predict();
  if (written.text.startsWith(text) && written.steps.length) showSteps(steps);
  return el("div", {},
    el("div", { class: "chips tools", role: "group", "aria-label": "Heads that are off" }, el("span", { class: "note" }, "heads off:"), chips.length ? chips : el("span", { class: "note" }, "none"), add,
      press("Predict", predict), (store.report.model.kind ?? "decoder") === "decoder" && press("Next word", () => step(text, steps))), outcome, steps);
}

function told(title, pairs) {
  return el("div", {}, el("h3", {}, title), barList(pairs.map(([word, p]) => [visible(word), p]), 3, true));
}

async function step(text, box) {
  const sight = await store.sentences[state.sentence].sight;
  if (!written.text.startsWith(text) || written.steps.length === 0) Object.assign(written, { text, tokens: [...sight.tokens], steps: [] });
  await trying(async () => {
    const made = await ask("api/step", { text: written.text, silenced: [...silenced] });
    written.steps.push({ token: made.token, rows: made.rows, tokens: made.tokens ?? [...written.tokens] });
    Object.assign(written, { text: made.text, tokens: [...written.tokens, made.token] });
    showSteps(box, chosenHeads(sight));
  });
}

// For each word that was written, where each chosen head looked while it was.
function showSteps(box, heads = [...Object.keys(written.steps[0].rows)].slice(0, 4)) {
  const colors = ramp();
  box.replaceChildren(el("p", { class: "context" }, written.text), ...written.steps.slice(-6).reverse().map((one) => el("div", {}, el("h3", {}, `“${visible(one.token)}”`),
    heads.filter((head) => one.rows[head]).map((head, place) => el("div", { class: "strip" }, el("div", { class: "tokens", role: "img", "aria-label": `Where ${head} looked` },
      el("span", { class: "chip", style: { "--chip": CHOSEN[place] } }, head),
      one.rows[head].map((weight, j) => el("span", { title: weight.toFixed(3), style: { background: shade(weight, colors), color: dark(weight, colors) ? "#fff" : "#000", padding: "0 4px", "border-radius": "3px" } }, visible(one.tokens[j] ?? "·")))))))));
}

function dark(weight, colors) {
  const [r, g, b] = colors[Math.round(Math.sqrt(Math.min(1, Math.max(0, weight))) * 255)];
  return r * 0.3 + g * 0.6 + b * 0.1 < 140;
}

// Why a token looked there: which parts of the stream at both met in the score, beside the mean of all it sees.
export function explainPanel(text, head, at, to, labels, words) {
  const box = el("div", { "aria-live": "polite" });
  const asked = () => trying(async () => {
    say("looking for reasons …");
    const made = await ask("api/explain", { text, head, query: at, key: to, words });
    const way = (side) => made.path.filter((one) => one.side === side).map((one) => `${one.part} at “${visible(one.token)}”` + (one.source_token === null ? "" : ` (from “${visible(one.source_token)}”)`)).join(" ← ");
    box.replaceChildren(
      el("p", { class: "note" }, `Its score lies ${Math.abs(made.score).toFixed(2)} ${made.score < 0 ? "below" : "above"} the mean of all that “${labels[at]}” sees. It is a sum over pairs: something written at “${labels[at]}” meets something written at “${labels[to]}”. The largest:`),
      barList(made.pairs.map((one) => [`${one.query} · ${one.key}`, one.score])),
      el("p", { class: "note" }, `The first pair began here. At “${labels[at]}”: ${way("query")}. At “${labels[to]}”: ${way("key")}.`));
    say("");
  });
  return el("div", { class: "stack" }, press(`Why did “${labels[at]}” look at “${labels[to]}”?`, asked, { "data-key": "explain" }), box);
}

async function trying(work) {
  try {
    await work();
  } catch (error) {
    say(`It did not work: ${error.message}`);
  }
}
