// Colors: eight for roles (role_badges.py), with opacity by evidence level; one ramp for weights; eight for heads shown together.

import { el } from "./dom.js";
import { store } from "./report.js";

const COLORS = ["#4b8796", "#f09600", "#8700d2", "#78b4c3", "#961e00", "#d24b0f", "#005a69", "#b469ff"];
const STRENGTH = { none: 0.1, attention: 0.55, "value-weighted": 0.75, causal: 1 };
export const CHOSEN = ["#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#b8860b", "#0b7285", "#c2255c", "#5c6470"];

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ?? false;
}

// Letters and color of a role from the report data; a role without an entry gets both from its name.
export function roleBadge(role) {
  const named = [...role].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 997, 7);
  return store.report?.role_badges?.[role] ?? [role.slice(0, 2), COLORS[named % COLORS.length]];
}

export function roleColor(role, alpha = 1) {
  if (role === "unclear") return `hsl(220 8% ${isDark() ? 70 : 50}% / ${alpha})`;
  const [r, g, b] = parts(roleBadge(role)[1]);
  return `rgb(${r} ${g} ${b} / ${alpha})`;
}

// The badge of a role.
export function roleMark(role) {
  if (role === "unclear") return el("span", { class: "sign none", "aria-hidden": "true" }, "·");
  return el("span", { class: "sign", "aria-hidden": "true", style: { background: roleColor(role), color: letterInk(role) } }, roleBadge(role)[0]);
}

// Text color with the higher contrast on the color of a role.
export function letterInk(role) {
  const [r, g, b] = parts(roleBadge(role)[1]).map((part) => (part <= 10.3 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

const parts = (color) => [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));

export function strength(level) {
  return STRENGTH[level] ?? 0.1;
}

// The ramp of weights as 256 colors, [r, g, b] each, by the square root of the weight.
export function ramp() {
  const stops = isDark()
    ? [[24, 28, 36], [30, 66, 110], [46, 134, 171], [137, 204, 178], [250, 243, 160]]
    : [[255, 255, 255], [205, 224, 241], [107, 160, 211], [38, 92, 168], [13, 32, 84]];
  return Array.from({ length: 256 }, (_, b) => {
    const at = (b / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * part));
  });
}

// The color of one weight.
export function shade(weight, colors) {
  const [r, g, b] = colors[Math.round(Math.sqrt(Math.min(1, Math.max(0, weight))) * 255)];
  return `rgb(${r} ${g} ${b})`;
}

// A color of the style sheet.
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
