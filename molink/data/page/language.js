// The page's language: that of the browser if lang/ has it, else English. English texts are the keys of a catalogue.

const CATALOGUES = ["de", "zh"];
// Read by people, and not what they type.
const ATTRIBUTES = ["aria-label", "placeholder", "title"];

// The first language of the browser, if it is one of `CATALOGUES`; "en" otherwise.
export function chooseLanguage(wanted) {
  const [first, ...rest] = String(wanted?.[0] ?? "").toLowerCase().split("-");
  // The catalogue is in simplified characters.
  if (first === "zh" && rest.some((part) => ["hant", "tw", "hk", "mo"].includes(part))) return "en";
  return CATALOGUES.includes(first) ? first : "en";
}

export const language = chooseLanguage(navigator.languages);
const catalogue = language === "en" ? {} : (await import(`./lang/${language}.js`)).default;

// Translate a text; {name} in it becomes `values.name`. What the catalogue lacks stays as it is. No line
// breaks before a percent sign.
export function t(text, values = {}) {
  const filled = (catalogue[text] ?? text).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
  return filled.replaceAll(" %", "\u00a0%");
}

// Translate the page as it was loaded.
export function translatePage(root = document.documentElement) {
  root.lang = language;
  for (const { text, set } of readTexts(root)) if (catalogue[text]) set(catalogue[text]);
}

// The texts below an element, each with a function that replaces it. Code in a sentence is in backticks.
export function* readTexts(root) {
  for (const node of root.querySelectorAll("*")) {
    for (const name of ATTRIBUTES) {
      if (node.getAttribute(name)) yield { text: node.getAttribute(name), set: (text) => node.setAttribute(name, text) };
    }
    if (["CODE", "KBD", "SCRIPT", "STYLE"].includes(node.nodeName)) continue;
    const children = [...node.childNodes];
    if (node.querySelector(":scope > code")) {
      const text = joinLines(children.map((child) => (child.nodeName === "CODE" ? `\`${child.textContent}\`` : child.data)).join(""));
      yield { text, set: (translated) => setCode(node, translated) };
      continue;
    }
    for (const child of children) {
      if (child.nodeType !== Node.TEXT_NODE || !/\p{L}/u.test(child.data)) continue;
      yield { text: joinLines(child.data), set: (text) => { child.data = child.data.replace(/\S[^]*\S|\S/, () => text); } };
    }
  }
}

const joinLines = (text) => text.replace(/\s+/g, " ").trim();

// Make a text with `code` in backticks the content of an element.
export function setCode(node, text) {
  const parts = text.split("`");
  const code = (part) => { const made = document.createElement("code"); made.textContent = part; return made; };
  node.replaceChildren(...(parts.length % 2 ? parts.map((part, at) => (at % 2 ? code(part) : part)) : [text]));
}
