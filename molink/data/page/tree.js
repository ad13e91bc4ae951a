// A conversation as a tree: editing a message or regenerating an answer starts a new branch.
//
// { id, title, updated, leaf, settings, nodes: { id: { id, parent, role, content, thoughts, note, problem, model,
//   cut, context } } }: `cut` answers can be continued, `context` are the tokens up to an answer's end, and
// `settings` hold for this conversation alone.

// The note of an answer that was running when the page closed.
export const NOT_COMPLETE = "incomplete: the page was closed";

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), leaf: null, nodes: {} };
}

// The messages from the root to the open leaf.
export function path(conversation) {
  const found = [];
  for (let id = conversation.leaf; id && found.length < 10000; id = conversation.nodes[id].parent) {
    if (!conversation.nodes[id]) break;
    found.push(conversation.nodes[id]);
  }
  return found.reverse();
}

// Append a message after `parent` (null: the root) and open its branch.
export function add(conversation, parent, fields) {
  const node = { id: newId(), parent, content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 59) + "…" : line;
}

// All versions of a message, itself included, oldest first.
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((one) => one.parent === node.parent);
}

// Open a version of a message and its newest continuation.
export function choose(conversation, node) {
  let last = node;
  for (;;) {
    const after = Object.values(conversation.nodes).filter((one) => one.parent === last.id);
    if (!after.length) break;
    last = after[after.length - 1];
  }
  conversation.leaf = last.id;
}

// Split reasoning that a model writes inline from its answer.
export function splitThoughts(content) {
  const begin = /^\s*<think>/.exec(content);
  if (!begin) return { thoughts: "", content, thinking: false };
  const end = content.indexOf("</think>");
  const from = begin[0].length;
  if (end < 0) return { thoughts: content.slice(from), content: "", thinking: true };
  return {
    thoughts: content.slice(from, end).trim(),
    content: content.slice(end + "</think>".length).trimStart(),
    thinking: false,
  };
}

// The messages to send: without reasoning and without empty answers.
export function messages(conversation, upTo, system) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of path({ ...conversation, leaf: upTo })) {
    const content = node.role === "assistant" ? splitThoughts(node.content).content : node.content;
    if (content.trim()) found.push({ role: node.role, content });
  }
  return found;
}

// Validate a stored conversation, which another version or the user may have written.
export function isConversation(one) {
  const texts = (node) => typeof node?.content === "string" && (node.role === "user" || node.role === "assistant");
  return typeof one?.id === "string" && typeof one.title === "string" && typeof one.updated === "number"
    && one.nodes !== null && typeof one.nodes === "object" && Object.values(one.nodes).every(texts);
}

// Read conversations that were saved as JSON, here or elsewhere as { title, messages }; throws Error.
export function parseConversations(text) {
  const read = JSON.parse(text);
  const found = (Array.isArray(read) ? read : [read]).map((one) => {
    if (isConversation(one?.tree) && isTree(one.tree)) return { ...newConversation(), ...one.tree, id: newId(), settings: textsIn(one.tree.settings) };
    if (!Array.isArray(one?.messages)) throw new Error("no conversation");
    const made = newConversation();
    for (const { role, content, reasoning_content: thoughts, model } of one.messages) {
      if (typeof content !== "string" || !["user", "assistant"].includes(role)) continue;
      add(made, made.leaf, { role, content, ...(role === "assistant" ? { thoughts: String(thoughts ?? ""), model: String(model ?? ""), note: "" } : {}) });
    }
    if (typeof one.title === "string" && one.title) made.title = one.title.slice(0, 200);
    return made;
  });
  return found.filter((one) => one.leaf);
}

// The entries of an object that are texts.
function textsIn(object) {
  return Object.fromEntries(Object.entries(object ?? {}).filter(([, value]) => typeof value === "string"));
}

// Whether each message's parent comes before it, so that there are no circles.
function isTree(one) {
  const seen = new Set();
  for (const [id, node] of Object.entries(one.nodes)) {
    if (node.id !== id || (node.parent !== null && !seen.has(node.parent))) return false;
    seen.add(id);
  }
  return seen.has(one.leaf);
}

// All text of a conversation, for a search.
export function textOf(conversation) {
  return [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)].join("\n");
}

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  for (const node of path(conversation)) {
    const name = node.role === "user" ? "You" : node.model || "Assistant";
    parts.push(`## ${name}`, node.role === "user" ? node.content : splitThoughts(node.content).content);
  }
  return parts.join("\n\n") + "\n";
}

export function asJson(conversation) {
  const shown = path(conversation).map(({ role, content, thoughts, model }) => ({ role, content, reasoning_content: thoughts, model }));
  return JSON.stringify({ title: conversation.title, messages: shown, tree: conversation }, null, 2) + "\n";
}
