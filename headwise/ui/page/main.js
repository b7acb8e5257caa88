// The page: navigation between views, header and shared controls.

import { el, number, press, say } from "./dom.js";
import { state, change, onChange, readHash } from "./state.js";
import { store, openReport } from "./report.js";
import { isDark } from "./color.js";
import { overview } from "./overview.js";
import { sentence } from "./sentence.js";
import { card } from "./card.js";
import { flow } from "./flow.js";
import { compare } from "./compare.js";
import { relations } from "./relations.js";
import { curves } from "./curves.js";
import { plan } from "./plan.js";
import { claims, counted } from "./claims.js";
import { glossary, listenWords } from "./glossary.js";
import { savePicture } from "./picture.js";

const VIEWS = { overview, sentence, card, flow, compare, relations, curves, plan, claims, glossary };
const NAMES = { overview: "Heads", sentence: "Sentence", card: "One head", flow: "Flow", compare: "Compare", relations: "Relations", curves: "Trade-off", plan: "Cost", claims: "Claims", glossary: "Glossary" };
// One line that describes each view.
const SEEN = {
  overview: "Each square is one head: layers from top to bottom, heads from left to right. Color and letters show its role; gray: no role found.",
  sentence: "Attention on one sentence: arcs lead from each query word to the keys it attends to, for the most active heads.",
  card: "One head: roles with their evidence, output, importance and cost.",
  flow: "Data flow of one token through one layer: attention of each head, and the sum of their outputs.",
  compare: "Compare two heads.",
  relations: "The best head for each grammatical relation, compared with the best fixed offset.",
  curves: "Loss against the number of heads, bits or cache entries removed.",
  plan: "Cost of every head: bits of its weights, size of its cache, and the loss with less of either.",
  claims: "Common claims about attention heads, each with the result of a test.",
  glossary: "Words of this page: their meaning, and the docs section that explains how the number is computed.",
};
const PICTURED = "Attention on one image: from one patch, from another token, or averaged over all patches.";
let turn = 0;

// Draw the current view. The focused control keeps the focus if it still exists.
async function render() {
  const mine = ++turn;
  const there = views(), view = there.includes(state.view) ? state.view : there[0];
  setTheme();
  navigation(there, view);
  const key = document.activeElement?.dataset?.key;
  const fresh = el("div", {});
  const main = document.getElementById("main");
  const before = [...main.childNodes];
  main.append(fresh); // views measure the available width
  try {
    await VIEWS[view](fresh);
  } catch (error) {
    fresh.replaceChildren(el("p", { class: "note error", role: "alert" }, `Cannot draw this view: ${error.message}`));
    console.error(error);
  }
  if (mine !== turn) return fresh.remove(); // a newer render has started
  for (const old of main.childNodes) if (old !== fresh) before.push(old);
  for (const old of before) old.remove();
  if (key) main.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  document.getElementById("seen").textContent = view === "sentence" && store.report.metadata.image_grid ? PICTURED : SEEN[view];
  document.title = `${nameOf(view)} – ${store.report.model.name || "Headwise"}`;
  main.dataset.view = view;
}

// The views that have content; a report of claims has only one.
function views() {
  const { heads, curves: curveList, plan: costs, claims: tested, metadata: about } = store.report;
  const filled = { ...(about?.image_grid ? { relations: false } : {}), curves: curveList.length > 0, plan: Boolean(costs), claims: tested.length > 0, glossary: Object.keys(store.report.glossary ?? {}).length > 0 };
  return Object.keys(VIEWS).filter((view) => filled[view] ?? (heads.length > 0 || tested.length === 0));
}

function navigation(there, now) {
  document.getElementById("views").replaceChildren(...there.map((view) => el("button", {
    type: "button", "data-key": `view ${view}`, "aria-current": view === now ? "page" : null, onclick: () => change({ view }),
  }, nameOf(view))));
}

function nameOf(view) {
  return view === "sentence" && store.report.metadata.image_grid ? "Image" : NAMES[view];
}

// Buttons that copy a link to the view or save it as an image.
function acts() {
  const link = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      say("Link copied.");
    } catch {
      say(`Link: ${location.href}`);
    }
  };
  document.getElementById("acts").replaceChildren(press("Link", link, { class: "small", title: "Copy a link to this view" }),
    ...["svg", "png"].map((kind) => press(kind.toUpperCase(), () => savePicture(kind), { class: "small", title: `Save this view as ${kind.toUpperCase()}` })));
}

// Introduction for the first visit.
function hello() {
  const key = "headwise-was-here";
  try {
    if (localStorage.getItem(key)) return;
    localStorage.setItem(key, "1");
  } catch { /* without local storage it is shown every time */ }
  if (!store.report.heads.length) return;
  const found = store.report.heads.filter((head) => head.roles.length).length;
  const line = el("p", { id: "hello", role: "note" }, `This page describes the ${number(store.report.heads.length)} attention heads of ${store.report.model.name || "the model"}: ${number(found)} of them have a role that was confirmed on held-out ${store.report.metadata.image_grid ? "images" : "texts"}. Hover over a square for a preview, click it for details. Underlined words have explanations. `,
    press("Got it", () => line.remove(), { class: "small" }));
  document.getElementById("seen").before(line);
}

function setTheme() {
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
  document.getElementById("theme").textContent = isDark() ? "☀ light" : "☾ dark";
}

function facts() {
  const { model, metadata: about, claims: tried } = store.report;
  const sizes = [`${model.layers.length} layers`, `${number(model.heads)} heads`, model.kind, model.width && `width ${model.width}`, model.parameters && (model.parameters < 1e6 ? `${number(model.parameters)} parameters` : `${number(model.parameters / 1e6, 1)} M parameters`)];
  document.getElementById("model-name").textContent = model.name;
  if (model.heads === 0 && tried.length) return document.getElementById("model-facts").replaceChildren(`${counted(tried.length, "claim")} · ${seeds(tried)}`);
  document.getElementById("model-facts").textContent = `${sizes.filter(Boolean).join(" · ")}; measured on ${number(about.texts)} ${about.image_grid ? "images" : "texts"}, ${number(about.tokens)} tokens`;
}

// Number of seeds of the claims.
function seeds(tried) {
  const counts = tried.map((one) => one.seeds.length), least = Math.min(...counts), most = Math.max(...counts);
  return `${least === most ? "" : `${least} to `}${counted(most, "seed")}`;
}

async function begin() {
  readHash();
  try {
    await openReport();
  } catch (error) {
    return document.getElementById("main").replaceChildren(el("p", { class: "note error", role: "alert" }, `Cannot load the report: ${error.message}`));
  }
  facts();
  acts();
  hello();
  listenWords();
  onChange(render);
  document.getElementById("theme").addEventListener("click", () => change({ theme: isDark() ? "light" : "dark" }));
  globalThis.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (state.view !== "overview") change({ view: "overview" });
    else if (state.role || state.search || state.verdict || state.cost_filter) change({ role: "", search: "", verdict: "", cost_filter: "" });
    say("");
  });
  let waiting = 0;
  globalThis.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(render, 150); });
  await render();
  document.documentElement.dataset.ready = "true"; // tests and benchmarks wait for this
}

begin();
