// The report data: what the page shows. In a report it stands in the page itself; a live server is asked for it.

import { Sight } from "./sight.js";
import { state } from "./state.js";

export const store = { report: null, heads: new Map(), sentences: [], other: null, live: false };
export const EVIDENCE_LEVELS = ["none", "attention", "value-weighted", "causal"];

export async function openReport() {
  const inside = document.getElementById("report-data");
  store.live = globalThis.headwise?.live === true || document.querySelector('meta[name="headwise-live"]') !== null;
  if (inside) store.report = JSON.parse(inside.textContent);
  else store.report = await ask("api/report");
  store.report.claims ??= []; // a report may have none
  store.heads = new Map(store.report.heads.map((head) => [head.address, head]));
  store.sentences = store.report.sentences.map((given) => ({ given, sight: null }));
}

// Ask the live server; what it refuses is told as it says it.
export async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  const answer = await fetch(path, options);
  const made = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(made.error ?? `the server answered ${answer.status}`);
  return made;
}

// A sentence unpacked, once; null where there is none.
export async function openSentence(place) {
  const found = store.sentences[place];
  if (!found) return null;
  found.sight ??= Sight.unpack(found.given);
  return found.sight;
}

export function addSentence(given) {
  const there = store.sentences.findIndex((one) => one.given.text === given.text);
  if (there >= 0) return there;
  store.sentences.push({ given, sight: null });
  return store.sentences.length - 1;
}

// Second report data to compare with: a report, or its data as JSON. Nothing in the file is run.
export async function openOther(file) {
  const text = await file.text();
  let data = text;
  if (!text.trimStart().startsWith("{")) {
    data = new DOMParser().parseFromString(text, "text/html").getElementById("report-data")?.textContent;
    if (!data) throw new Error(`${file.name} is neither a report nor report data`);
  }
  const report = JSON.parse(data);
  if (!Array.isArray(report.heads) || report.heads.length === 0) throw new Error(`${file.name} holds no heads`);
  if (report.version !== store.report.version) throw new Error(`${file.name} was written by another version; make it again: headwise profile --report`);
  store.other = { name: report.model?.name || file.name, heads: new Map(report.heads.map((head) => [head.address, head])) };
}

// Heads whose role is supported best: one for each role, then the others.
export function bestHeads(count) {
  const rank = (head) => EVIDENCE_LEVELS.indexOf(head.evidence_level) * 10 + (head.score === null ? 0 : (head.score - head.baseline) / (1 - head.baseline));
  const ordered = [...store.report.heads].sort((a, b) => rank(b) - rank(a));
  const firsts = ordered.filter((head, i) => head.role !== "unclear" && ordered.findIndex((o) => o.role === head.role) === i);
  return [...new Set([...firsts, ...ordered])].slice(0, count).map((head) => head.address);
}

// Its first role, and how many more it has: possessive > +4.
export function describeRole(head) {
  return [head.role, head.detail, head.roles.length > 1 ? `+${head.roles.length - 1}` : ""].filter(Boolean).join(" ");
}

// What a head is, in a few words.
export function describe(head) {
  const role = describeRole(head) + (head.corpus_label ? `, ${head.corpus_label}` : "");
  const score = head.score === null ? "" : `, ${head.score.toFixed(2)} against ${head.baseline.toFixed(2)}, its baseline`;
  const idle = head.idle_patterns.length ? `; idle pattern: ${head.idle_patterns.join(", ")}` : "";
  return `${role}, ${head.evidence_level}${score}${idle}`;
}

// The heads asked for, or the one that is open and those that matter most on this sentence; as many as there are colors.
// `token`: the place whose looks count, −1 for the whole sentence.
export function chosenHeads(sight, token = -1) {
  const asked = state.heads ? state.heads.split(",") : [state.head, ...sight.matters(token)].filter(Boolean).slice(0, 4);
  return [...new Set(asked)].filter((head) => sight.has(head)).slice(0, 8);
}
