// Nodes made one by one: no text ever becomes HTML here.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  list: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  gear: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  send: "M12 19V5M5.5 11.5 12 5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  back: "M15 5l-7 7 7 7",
  forth: "M9 5l7 7-7 7",
};

export const byId = (id) => document.getElementById(id);

// An element with that class, holding texts and nodes.
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

// A button that shows only a glyph; `label` is what is read and shown as a tip.
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

// Set a text only if it is another one: what didn't change is not read out again.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// For those who don't see: said once whoever reads the screen has ended a sentence.
export function say(text) {
  byId("said").textContent = text;
}

// Have `parent` hold just these nodes. Those that stay are not moved, so focus stays as well.
export function arrange(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, at) => {
    if (parent.childNodes[at] !== node) parent.insertBefore(node, parent.childNodes[at] ?? null);
  });
}

// Pages of plain HTTP from another PC have no clipboard API; the old way works there.
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

// A button that copies what `text()` is then, and says so.
export function copyButton(label, text) {
  const node = iconButton("copy", label, async () => {
    await copyText(text());
    node.classList.add("done");
    say("Copied");
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

// Resolves to whether it was confirmed.
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
