// The page: which view is shown, and what all of them share.

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
const NAMES = { overview: "Heads", sentence: "Sentence", card: "One head", flow: "Flow", compare: "Compare", relations: "Relations", curves: "Trade-off", plan: "Cost", claims: "Claims", glossary: "Words" };
// One line that says what is seen.
const SEEN = {
  overview: "Every square is one head: layers from top to bottom, heads from left to right. Color and letters are what it does; grey: nothing was found.",
  sentence: "One sentence: arcs lead from each word to the words it looks at, in the heads that matter here.",
  card: "One head: what it does, how sure that is, what it writes, what the model loses without it.",
  flow: "One token on its way through one layer: into every head, and out as the sum of what they write.",
  compare: "Two heads side by side.",
  relations: "For each grammatical relation the head that follows it best, beside the best fixed distance.",
  curves: "What is lost as heads, bits or caches are taken away.",
  plan: "What every head costs: bits of its weights, its cache, and what less of either would lose.",
  claims: "What guides say about heads, each put to a test.",
  glossary: "Every word of this page, what it means and where it is told how its number is made.",
};
const PICTURED = "One picture: where each head looks from one patch, from another token, or from all patches on average.";
let turn = 0;

// Draw the view that is asked for; the focus stays where it was, if that is still there.
async function render() {
  const mine = ++turn;
  const there = views(), view = there.includes(state.view) ? state.view : there[0];
  setTheme();
  navigation(there, view);
  const key = document.activeElement?.dataset?.key;
  const fresh = el("div", {});
  const main = document.getElementById("main");
  const before = [...main.childNodes];
  main.append(fresh); // views measure the room they have
  try {
    await VIEWS[view](fresh);
  } catch (error) {
    fresh.replaceChildren(el("p", { class: "note error", role: "alert" }, `This view failed: ${error.message}`));
    console.error(error);
  }
  if (mine !== turn) return fresh.remove(); // something newer was asked for meanwhile
  for (const old of main.childNodes) if (old !== fresh) before.push(old);
  for (const old of before) old.remove();
  if (key) main.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  document.getElementById("seen").textContent = view === "sentence" && store.report.metadata.image_grid ? PICTURED : SEEN[view];
  document.title = `${nameOf(view)} – ${store.report.model.name || "Headwise"}`;
  main.dataset.view = view;
}

// The views that have something to show; a report of claims alone has one.
function views() {
  const { heads, curves: cut, plan: priced, claims: tried, metadata: about } = store.report;
  const filled = { ...(about?.image_grid ? { relations: false } : {}), curves: cut.length > 0, plan: Boolean(priced), claims: tried.length > 0, glossary: Object.keys(store.report.glossary ?? {}).length > 0 };
  return Object.keys(VIEWS).filter((view) => filled[view] ?? (heads.length > 0 || tried.length === 0));
}

function navigation(there, now) {
  document.getElementById("views").replaceChildren(...there.map((view) => el("button", {
    type: "button", "data-key": `view ${view}`, "aria-current": view === now ? "page" : null, onclick: () => change({ view }),
  }, nameOf(view))));
}

function nameOf(view) {
  return view === "sentence" && store.report.metadata.image_grid ? "Picture" : NAMES[view];
}

// A link to what is shown, and pictures of it.
function acts() {
  const link = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      say("the link to this view was copied");
    } catch {
      say(`the link to this view: ${location.href}`);
    }
  };
  document.getElementById("acts").replaceChildren(press("Link", link, { class: "small", title: "Copy a link to just this view" }),
    ...["svg", "png"].map((kind) => press(kind.toUpperCase(), () => savePicture(kind), { class: "small", title: `Save a picture of this view as ${kind.toUpperCase()}` })));
}

// Said once, to those who come for the first time.
function hello() {
  const key = "headwise-was-here";
  try {
    if (localStorage.getItem(key)) return;
    localStorage.setItem(key, "1");
  } catch { /* a browser that keeps nothing says it each time */ }
  if (!store.report.heads.length) return;
  const found = store.report.heads.filter((head) => head.roles.length).length;
  const line = el("p", { id: "hello", role: "note" }, `New here? This page shows what each of the ${number(store.report.heads.length)} attention heads of ${store.report.model.name || "the model"} does: for ${number(found)} of them something was found that held on ${store.report.metadata.image_grid ? "pictures" : "texts"} it was not chosen on. Point at a square, or press it. Underlined words explain themselves. `,
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
  document.getElementById("model-facts").textContent = `${sizes.filter(Boolean).join(" · ")}; measured on ${number(about.texts)} ${about.image_grid ? "pictures" : "texts"}, ${number(about.tokens)} tokens`;
}

// With how many seeds claims were tried.
function seeds(tried) {
  const counts = tried.map((one) => one.seeds.length), least = Math.min(...counts), most = Math.max(...counts);
  return `${least === most ? "" : `${least} to `}${counted(most, "seed")}`;
}

async function begin() {
  readHash();
  try {
    await openReport();
  } catch (error) {
    return document.getElementById("main").replaceChildren(el("p", { class: "note error", role: "alert" }, `There is nothing to show: ${error.message}`));
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
  document.documentElement.dataset.ready = "true"; // what tests and benchmarks wait for
}

begin();
