// Renders untrusted Markdown: raw HTML is shown as text, the parser's output passes DOMPurify with
// few allowed elements, and nothing is loaded unless the user clicks a link.

import { copyButton, make } from "./dom.js";
import { formulas, renderFormulas } from "./math.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import { t } from "./language.js";

// Longer texts and paragraphs are shown as plain text; longer code is not highlighted.
const LONGEST = 300_000, LONGEST_PARAGRAPH = 20_000, LONGEST_CODE = 40_000;
// Parsing is quadratic for some texts: after this many slow parses, of this many milliseconds, the
// text is shown as plain text.
const SLOW_MS = 300, SLOW_TIMES = 2;
// Time for the formulas of one text, in milliseconds; later ones are shown as written.
const FORMULAS_MS = 3000;

const POLICY = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("uponSanitizeAttribute", (_node, data) => {
  if (data.attrName === "class") data.keepAttr = /^(?:language-[\w+#.-]{1,40}|hljs-[\w-]+(?: [\w-]+)*|formula(?:-display)?|tml-[\w-]+(?: tml-[\w-]+)*)$/.test(data.attrValue);
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  if (!node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.title = node.getAttribute("href");
});

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // Images are not fetched; they are shown as links.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

marked.use(formulas);

// Renders a growing text: completed blocks are not rendered again.
export class MarkdownView {
  #blocks = [];
  #slow = 0;
  #formulas = { left: FORMULAS_MS };

  // `plain`: show the text without Markdown.
  constructor(node, plain = false) {
    this.node = node;
    this.plain = plain;
    node.classList.add("markdown");
  }

  // `done`: the text is complete.
  show(text, done) {
    const tokens = this.#parse(text);
    if (!tokens) {
      this.#blocks = [];
      this.node.replaceChildren(make("div", "raw", text));
      return;
    }
    if (!this.#blocks.length) this.node.replaceChildren();
    const last = tokens.length - 1;
    tokens.forEach((token, at) => {
      const open = at === last && !done;
      const before = this.#blocks[at];
      if (before?.raw === token.raw && before.open === open) return;
      const nodes = rendered(token, open, this.#formulas);
      if (before) {
        before.nodes[0].before(...nodes);
        before.nodes.forEach((node) => node.remove());
      } else {
        this.node.append(...nodes);
      }
      this.#blocks[at] = { raw: token.raw, open, nodes };
    });
    for (const extra of this.#blocks.splice(tokens.length)) extra.nodes.forEach((node) => node.remove());
  }

  // The blocks of the text; null if it is too long or fails to parse.
  #parse(text) {
    if (this.plain || text.length > LONGEST || longParagraph(text)) return null;
    const began = performance.now();
    try {
      return marked.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
    } catch {
      return null; // nested deeper than the stack
    } finally {
      if (performance.now() - began > SLOW_MS) this.#slow += 1;
      this.plain = this.#slow >= SLOW_TIMES;
    }
  }
}

// Code blocks may be long; they are cheap to render.
function longParagraph(text) {
  return text.length > LONGEST_PARAGRAPH
    && text.split(/\n\s*\n/).some((one) => one.length > LONGEST_PARAGRAPH && !/^ {0,3}(```|~~~)/m.test(one));
}

function rendered(token, open, budget) {
  let fragment;
  try {
    fragment = DOMPurify.sanitize(marked.parser([token]), POLICY);
  } catch {
    return [make("div", "raw", token.raw)];
  }
  for (const pre of fragment.querySelectorAll("pre")) dress(pre, open);
  renderFormulas(fragment, budget);
  for (const table of fragment.querySelectorAll("table")) scrolls(table);
  // At least one node, so that the block keeps its position.
  return fragment.childNodes.length ? [...fragment.childNodes] : [document.createTextNode("")];
}

// A wide table scrolls on its own, also with the keyboard.
function scrolls(table) {
  const box = make("div", "wide");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", t("Table"));
  table.replaceWith(box);
  box.append(table);
}

// A code block shows its language and a copy button.
function dress(pre, open) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const head = make("div", "code-head", make("span", "", language), copyButton(t("Copy the code"), () => code.textContent.trimEnd()));
  const box = make("div", "code", head);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? t("Code, {language}", { language }) : t("Code"));
  pre.replaceWith(box);
  box.append(pre);
  if (!open && language && code.textContent.length < LONGEST_CODE) colour(code, language.toLowerCase());
}

let highlighter = null;

// The highlighter is loaded with the first code block that names a language.
async function colour(code, language) {
  try {
    highlighter ??= import("./vendor/highlight.js");
    const { default: hljs } = await highlighter;
    if (!hljs.getLanguage(language)) return;
    const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
    code.replaceChildren(DOMPurify.sanitize(value, POLICY));
  } catch { /* then it has one colour */ }
}
