// The report data: embedded in the page of a report, or requested from the live server.

import { Sight } from "./sight.js";
import { state } from "./state.js";

export const store = { report: null, heads: new Map(), sentences: [], other: null, live: false };
export const EVIDENCE_LEVELS = ["none", "attention", "value-weighted", "causal"];

export async function openReport() {
  const inside = document.getElementById("report-data");
  store.live = globalThis.headwise?.live === true || document.querySelector('meta[name="headwise-live"]') !== null;
  if (inside) store.report = JSON.parse(inside.textContent);
  else store.report = await ask("api/report");
  store.report.claims ??= []; // optional
  store.heads = new Map(store.report.heads.map((head) => [head.address, head]));
  store.sentences = store.report.sentences.map((given) => ({ given, sight: null }));
}

// Send a request to the live server. Errors carry the message of the server.
export async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  const answer = await fetch(path, options);
  const made = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(made.error ?? `the server returned status ${answer.status}`);
  return made;
}

// A sentence, unpacked once; null if it does not exist.
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

// Open a second report, as HTML or JSON, for comparison. Scripts in the file are not run.
export async function openOther(file) {
  const text = await file.text();
  let data = text;
  if (!text.trimStart().startsWith("{")) {
    data = new DOMParser().parseFromString(text, "text/html").getElementById("report-data")?.textContent;
    if (!data) throw new Error(`${file.name}: not a report. Choose an HTML or JSON report.`);
  }
  const report = JSON.parse(data);
  if (!Array.isArray(report.heads) || report.heads.length === 0) throw new Error(`${file.name}: the report has no heads.`);
  if (report.version !== store.report.version) throw new Error(`${file.name}: other format version. Create it again: headwise profile --report.`);
  store.other = { name: report.model?.name || file.name, heads: new Map(report.heads.map((head) => [head.address, head])) };
}

// Heads with the strongest evidence: one per role, then the others.
export function bestHeads(count) {
  const rank = (head) => EVIDENCE_LEVELS.indexOf(head.evidence_level) * 10 + (head.score === null ? 0 : (head.score - head.baseline) / (1 - head.baseline));
  const ordered = [...store.report.heads].sort((a, b) => rank(b) - rank(a));
  const firsts = ordered.filter((head, i) => head.role !== "unclear" && ordered.findIndex((o) => o.role === head.role) === i);
  return [...new Set([...firsts, ...ordered])].slice(0, count).map((head) => head.address);
}

// The first role and the number of further roles: possessive > +4.
export function describeRole(head) {
  return [head.role, head.detail, head.roles.length > 1 ? `+${head.roles.length - 1}` : ""].filter(Boolean).join(" ");
}

// Names of idle patterns.
export const IDLE_NAMES = { sink: "attention sink", "special token": "special-token sink", broad: "diffuse", idle: "inactive" };

export function describeIdle(head) {
  return head.idle_patterns.map((one) => IDLE_NAMES[one] ?? one).join(", ");
}

// A head in a few words.
export function describe(head) {
  const role = describeRole(head) + (head.corpus_label ? `, ${head.corpus_label}` : "");
  const score = head.score === null ? "" : `, score ${head.score.toFixed(2)}, baseline ${head.baseline.toFixed(2)}`;
  const idle = head.idle_patterns.length ? `; idle pattern: ${describeIdle(head)}` : "";
  return `${role}, ${head.evidence_level}${score}${idle}`;
}

// The selected heads, or the open head and the most active ones on this sentence; at most as many as there are colors.
// `token`: query position, −1 for all.
export function chosenHeads(sight, token = -1) {
  const selected = state.heads ? state.heads.split(",") : [state.head, ...sight.matters(token)].filter(Boolean).slice(0, 4);
  return [...new Set(selected)].filter((head) => sight.has(head)).slice(0, 8);
}
