// DOM helpers. Text is always inserted as text nodes, never parsed as HTML.

import { setCode, t } from "./language.js";

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  list: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  gear: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  send: "M12 19V5M5.5 11.5 12 5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 2-2 5 5M15.5 8.5v1",
  close: "M6 6l12 12M18 6 6 18",
  book: "M6 4h12v16l-6-4-6 4z",
  back: "M15 5l-7 7 7 7",
  forward: "M9 5l7 7-7 7",
};

export const byId = (id) => document.getElementById(id);

// Create an element with a class and children.
export function make(kind, className = "", ...children) {
  const node = document.createElement(kind);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export function svg(kind, attributes, ...children) {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { viewBox: "0 0 24 24", class: `glyph ${name}`, "aria-hidden": "true" }, path);
}

// A button that shows only an icon; `label` is its accessible name and tooltip.
export function iconButton(name, label, act) {
  const node = make("button", "icon", icon(name));
  node.type = "button";
  node.setAttribute("aria-label", label);
  node.title = label;
  node.addEventListener("click", act);
  return node;
}

export function textButton(text, act, className = "plain") {
  const node = make("button", className, text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

// Set the text only if it changed, so that screen readers do not repeat it.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Set a sentence with its `commands` as code, only if it changed.
export function setSentence(node, text) {
  if (node.dataset.sentence === text) return;
  node.dataset.sentence = text;
  setCode(node, text);
}

// Announce a text to screen readers without interrupting them.
export function say(text) {
  byId("announcement").textContent = text;
}

// Make `nodes` the only children of `parent`. Nodes that stay are not moved, so focus is kept.
export function arrange(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, at) => {
    if (parent.childNodes[at] !== node) parent.insertBefore(node, parent.childNodes[at] ?? null);
  });
}

// Pages served over plain HTTP from another PC have no clipboard API; fall back to execCommand.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const focused = document.activeElement;
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus({ preventScroll: true });
  }
}

// A button that copies the current value of `text()`.
export function copyButton(label, text) {
  const node = iconButton("copy", label, async () => {
    await copyText(text());
    node.classList.add("done");
    say(t("Copied"));
    setTimeout(() => node.classList.remove("done"), 1500);
  });
  return node;
}

export function download(name, type, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Ask for confirmation; resolves to true or false.
export function confirmed(question, word) {
  const dialog = byId("confirm");
  setText(byId("confirm-text"), question);
  setText(byId("confirm-yes"), word);
  return new Promise((resolve) => {
    let answer = false;
    const close = (value) => () => { answer = value; dialog.close(); };
    byId("confirm-yes").onclick = close(true);
    byId("confirm-no").onclick = close(false);
    dialog.addEventListener("close", () => resolve(answer), { once: true });
    dialog.showModal();
  });
}
