// Words with explanations: hovering or focusing a word shows a tooltip, clicking it opens the glossary.

import { el, section, grid } from "./dom.js";
import { state, change } from "./state.js";
import { store } from "./report.js";
import { roleMark } from "./color.js";

// A word with a tooltip; plain text if the glossary has no entry.
export function word(text, key = text) {
  if (!store.report.glossary?.[key]) return text;
  return el("button", { type: "button", class: "word", "data-word": key, "data-key": `word ${key}`, "aria-describedby": "hint" }, text);
}

// A button after a sentence that explains how its numbers are computed.
export function whence(key) {
  if (!store.report.glossary?.[key]) return null;
  return el("button", { type: "button", class: "word whence", "data-word": key, "data-key": `how ${key}`, "aria-describedby": "hint", "aria-label": `How this is computed: ${key}` }, "how?");
}

// One tooltip for the page, next to the word that is hovered or focused.
export function listenWords() {
  const hint = document.getElementById("hint");
  const hide = () => { hint.hidden = true; };
  const show = (event) => {
    const at = event.target.closest?.("[data-word]"), found = at && store.report.glossary?.[at.dataset.word];
    if (!found) return hide();
    hint.replaceChildren(el("b", {}, at.dataset.word), `: ${found[0]}. `, el("small", {}, `How it is computed: docs/${found[1]}`));
    hint.hidden = false;
    const box = at.getBoundingClientRect(), wide = Math.min(340, innerWidth - 16);
    hint.style.width = `${wide}px`;
    hint.style.left = `${Math.max(8, Math.min(innerWidth - wide - 8, box.left))}px`;
    const below = box.bottom + 6 + hint.offsetHeight < innerHeight;
    hint.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - hint.offsetHeight - 6)}px`;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || hint.hidden) return;
    hide();
    event.stopImmediatePropagation(); // the first Escape only closes the tooltip
  }, true);
  document.addEventListener("click", (event) => {
    const at = event.target.closest?.("[data-word]");
    if (!at) return;
    hide();
    change({ view: "glossary", word: at.dataset.word });
  });
}

// The glossary view: all words and roles.
export async function glossary(root) {
  const { glossary: entries = {}, role_badges: badges = {} } = store.report;
  const rows = Object.entries(entries).map(([name, [meaning, docs]]) => [el("span", { id: `word-${name}`, tabindex: "-1" }, name), meaning, el("code", {}, `docs/${docs}`)]);
  const roles = Object.entries(badges).map(([role, [, , means]]) => [el("span", {}, roleMark(role), ` ${role}`), means ?? "", store.report.heads.filter((head) => head.roles.includes(role)).length]);
  root.append(el("div", { class: "stack" },
    section("Words", grid("Meaning, and the docs section that explains how the number is computed", ["word", "meaning", "computed"], rows, { "data-table": "words" })),
    roles.length > 0 && section("Roles", grid("Each role has a unique combination of letters and color", ["role", "behavior", "heads"], roles, { "data-table": "roles" }))));
  if (state.word) requestAnimationFrame(() => {
    const at = document.getElementById(`word-${state.word}`);
    at?.closest("tr").classList.add("here");
    at?.scrollIntoView({ block: "center" });
    at?.focus({ preventScroll: true });
  });
}
