// The state of the page, stored in the URL fragment, so that a link restores the view.

const START = {
  view: "overview", head: "", other: "", sentence: 0, level: "token", value_weighted: false, token: -1, heads: "", role: "",
  sort: "layer", search: "", thumb: "map", pin: "", layer: "", relation: "", verdict: "", claim: "", cost: "", cost_filter: "", word: "", idle: false, theme: "",
};
export const state = { ...START };
const listeners = [];

export function onChange(listener) {
  listeners.push(listener);
}

// Change the state and notify listeners, unless `quiet`. A change of view, head, claim or word adds an entry to the history.
export function change(patch, quiet = false) {
  const step = ["view", "head", "other", "claim", "word"].some((key) => key in patch && patch[key] !== state[key]);
  Object.assign(state, patch);
  const hash = `#${writeHash(state)}`;
  if (hash !== location.hash) history[step ? "pushState" : "replaceState"](null, "", hash);
  if (!quiet) for (const listener of listeners) listener();
}

export function writeHash(from) {
  const kept = Object.entries(from).filter(([key, value]) => value !== START[key]);
  return new URLSearchParams(kept.map(([key, value]) => [key, value === true ? "1" : String(value)])).toString();
}

export function readHash(text = location.hash) {
  const given = new URLSearchParams(text.replace(/^#/, ""));
  for (const [key, usual] of Object.entries(START)) {
    const value = given.get(key);
    if (value === null) state[key] = usual;
    else if (typeof usual === "number") state[key] = Number.isInteger(Number(value)) ? Number(value) : usual;
    else state[key] = typeof usual === "boolean" ? value === "1" : value;
  }
}

globalThis.addEventListener?.("popstate", () => {
  readHash();
  for (const listener of listeners) listener();
});
