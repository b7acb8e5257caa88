// Export the view with its styles as SVG (for browsers) or PNG. Nothing is sent anywhere.

import { el, say } from "./dom.js";
import { isDark } from "./color.js";

const XHTML = document.documentElement.namespaceURI, DRAWING = "http://www.w3.org/2000/svg", MOST = 16_000_000; // pixels of a PNG

// The view as an SVG document: [text, width, height].
export function pictureOf(main) {
  const wide = Math.ceil(Math.max(main.scrollWidth, ...[...main.querySelectorAll(".board, .strip, .heat")].map((one) => one.scrollWidth + 60))), copy = main.cloneNode(true);
  const drawn = [...main.querySelectorAll("canvas")];
  copy.querySelectorAll("canvas").forEach((one, i) => {
    const image = document.createElementNS(XHTML, "img");
    image.setAttribute("src", drawn[i].toDataURL());
    image.className = drawn[i].className;
    image.style.cssText = drawn[i].style.cssText; // not as an attribute, which a strict content security policy blocks
    one.replaceWith(image);
  });
  const fields = [...main.querySelectorAll("input, textarea")];
  copy.querySelectorAll("input, textarea").forEach((one, i) => { if (one.matches("textarea")) one.textContent = fields[i].value; else one.setAttribute("value", fields[i].value); });
  const high = Math.ceil(main.scrollHeight), made = document.createElementNS(DRAWING, "svg"), style = document.createElementNS(DRAWING, "style");
  style.textContent = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText).join("\n")
    + "\n.board, .strip, .heat, .scroll { overflow: visible; max-height: none; }";
  made.setAttribute("xmlns", DRAWING);
  made.setAttribute("width", wide);
  made.setAttribute("height", high);
  made.dataset.theme = isDark() ? "dark" : "light";
  const room = document.createElementNS(DRAWING, "foreignObject"), page = document.createElementNS(XHTML, "div");
  room.setAttribute("width", "100%");
  room.setAttribute("height", "100%");
  page.style.cssText = `width:${wide}px;min-height:${high}px;background:var(--ground);color:var(--text)`;
  page.append(copy);
  room.append(page);
  made.append(style, room);
  return [new XMLSerializer().serializeToString(made), wide, high];
}

export async function savePicture(kind) {
  const main = document.getElementById("main"), [text, wide, high] = pictureOf(main);
  const name = `${document.title.replaceAll(/[^\w.-]+/g, "-").replaceAll(/^-+|-+$/g, "")}.${kind}`;
  try {
    save(kind === "svg" ? new Blob([text], { type: "image/svg+xml" }) : await asPng(text, wide, high), name);
    say(`Saved ${name}.`);
  } catch (error) {
    say(`This browser cannot export ${kind.toUpperCase()} (${error.message}). Try the other format.`);
  }
}

async function asPng(text, wide, high) {
  const image = new Image(), scale = Math.min(2, Math.sqrt(MOST / (wide * high)));
  await new Promise((done, failed) => {
    image.onload = done;
    image.onerror = () => failed(new Error("rendering failed"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
  const canvas = el("canvas", { width: Math.round(wide * scale), height: Math.round(high * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) => canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("too large"))), "image/png"));
}

function save(blob, name) {
  const address = URL.createObjectURL(blob), link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
