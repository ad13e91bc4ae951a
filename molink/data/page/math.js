// Formulas in TeX between $…$, $$…$$, \(…\) or \[…\], rendered as MathML. The converter is loaded with
// the first formula; its output passes DOMPurify with the elements of MathML alone.

import DOMPurify from "./vendor/purify.js";

// Macros may expand into so many parts. Formulas of more than 4000 characters are shown as text.
const MAX_EXPAND = 200;

const POLICY = {
  ALLOWED_TAGS: [
    "span", "math", "menclose", "merror", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom",
    "mprescripts", "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd",
    "mtext", "mtr", "munder", "munderover", "none",
  ],
  ALLOWED_ATTR: [
    "accent", "accentunder", "class", "columnalign", "columnlines", "columnspacing", "depth", "display",
    "displaystyle", "fence", "form", "frame", "height", "largeop", "linethickness", "lspace", "mathcolor",
    "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "rowlines", "rowspacing", "rspace",
    "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width",
  ],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  IN_PLACE: true,
};

// A dollar sign before a space or after one, or before a digit, is money; code is no formula.
const INLINE = [
  { pattern: /^\$\$(?:[^$\\]|\\[\s\S]){1,4000}?\$\$/, display: true },
  { pattern: /^\$(?![\s$])(?:[^$\\\n`]|\\[\s\S]){0,4000}?[^\s$\\`]\$(?!\d)/, display: false },
  { pattern: /^\\\([\s\S]{1,4000}?\\\)/, display: false },
  { pattern: /^\\\[[\s\S]{1,4000}?\\\]/, display: true },
];
// A formula that begins a line and is alone on its lines; Markdown has no say in it.
const BLOCK = /^(?:\$\$(?:[^$\\]|\\[\s\S]){1,4000}?\$\$|\\\[[\s\S]{1,4000}?\\\])[ \t]*(?:\n+|$)/;

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const where = (text, pattern) => {
  const at = text.search(pattern);
  return at < 0 ? undefined : at;
};
const renderer = ({ raw, display }) => `<span class="formula${display ? "-display" : ""}">${escaped(raw.trim())}</span>`;

// Extensions of marked: a formula becomes an element with its source, for `renderFormulas`.
export const formulas = {
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (text) => where(text, /\$|\\[([]/),
      tokenizer: (text) => {
        for (const { pattern, display } of INLINE) {
          const found = pattern.exec(text);
          if (found) return { type: "formula", raw: found[0], display };
        }
        return undefined;
      },
      renderer,
    },
    {
      name: "formulaBlock",
      level: "block",
      start: (text) => where(text, /^(?:\$\$|\\\[)/m),
      tokenizer: (text) => {
        const found = BLOCK.exec(text);
        return found ? { type: "formulaBlock", raw: found[0], display: true } : undefined;
      },
      renderer,
    },
  ],
};

let converter = null;

// Render the formulas in `fragment` in place, while `budget.left` milliseconds are left; one with an error stays
// as it was written.
export async function renderFormulas(fragment, budget) {
  const places = [...fragment.querySelectorAll(".formula, .formula-display")];
  if (!places.length) return;
  try {
    converter ??= import("./vendor/temml.js");
    const { default: temml } = await converter;
    for (const place of places) {
      if (budget.left <= 0) return;
      const began = performance.now();
      render(temml, place);
      budget.left -= performance.now() - began;
    }
  } catch { /* then they stay as written */ }
}

function render(temml, place) {
  const raw = place.textContent;
  const source = raw.startsWith("$") && !raw.startsWith("$$") ? raw.slice(1, -1) : raw.slice(2, -2);
  try {
    const options = { displayMode: place.className === "formula-display", throwOnError: true, maxExpand: MAX_EXPAND, maxSize: 20, trust: false };
    // Made of nodes, not parsed: the page's policy forbids the styles that a text of it has.
    const made = document.createElement("span");
    temml.render(source, made, options);
    DOMPurify.sanitize(made, POLICY);
    if (made.querySelector("math")) place.replaceChildren(...made.childNodes);
  } catch { /* not TeX */ }
}
