// Colours: a hue for each role, stronger the higher its rung; one ramp for weights; a few for heads side by side.

const HUES = {
  "previous token": 195, "next token": 205, "fixed offset": 215, self: 180, local: 170, induction: 305, "duplicate token": 325,
  copy: 340, delimiter: 45, capitalised: 35, digit: 55, "long range": 230, "same phrase": 245,
  "part of speech": 260, semantic: 130, coreference: 145, possessive: 110, bracket: 5, quote: 15,
};
const STRENGTH = { unclear: 0.1, pattern: 0.16, selective: 0.4, effective: 0.65, causal: 1 };
export const CHOSEN = ["#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#b8860b", "#0b7285", "#c2255c", "#5c6470"];

export function isDark() {
  const asked = document.documentElement.dataset.theme;
  return asked ? asked === "dark" : globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ?? false;
}

// Roles that are not in the table are relations: each takes a hue from its name, among the greens.
export function roleColour(role, alpha = 1) {
  const light = isDark() ? 62 : 42;
  if (role === "unclear") return `hsl(220 8% ${light + 8}% / ${alpha})`;
  const named = [...role].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 997, 7);
  return `hsl(${HUES[role] ?? 75 + (named % 90)} 62% ${light}% / ${alpha})`;
}

export function strength(rung) {
  return STRENGTH[rung] ?? 0.1;
}

// The ramp of weights as 256 colours, [r, g, b] each, by the square root of the weight.
export function ramp() {
  const stops = isDark()
    ? [[24, 28, 36], [30, 66, 110], [46, 134, 171], [137, 204, 178], [250, 243, 160]]
    : [[255, 255, 255], [205, 224, 241], [107, 160, 211], [38, 92, 168], [13, 32, 84]];
  return Array.from({ length: 256 }, (_, b) => {
    const at = (b / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * part));
  });
}

// The colour of one weight.
export function shade(weight, colours) {
  const [r, g, b] = colours[Math.round(Math.sqrt(Math.min(1, Math.max(0, weight))) * 255)];
  return `rgb(${r} ${g} ${b})`;
}

// A colour of the style sheet.
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
