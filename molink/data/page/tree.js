// A conversation as a tree: editing a message or regenerating an answer starts a new branch.
//
// { id, title, updated, leaf, settings, nodes: { id: { id, parent, role, content, thoughts, note, problem, model,
//   images, cut, context } } }: `cut` answers can be continued, `context` are the tokens up to an answer's end,
// `images` of a message are { id, name, bytes, width, height }, and `settings` hold for this conversation alone.

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
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content || node.images?.[0]?.name || "");
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

// The messages to send: without reasoning and without empty answers. `urls` has the images' by id.
export function messages(conversation, upTo, system, urls = new Map()) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of path({ ...conversation, leaf: upTo })) {
    const content = node.role === "assistant" ? splitThoughts(node.content).content : node.content;
    if (node.images?.length) found.push({ role: node.role, content: parts(node, urls) });
    else if (content.trim()) found.push({ role: node.role, content });
  }
  return found;
}

// The images of a message, then its text. An image that this browser lost is named to the model.
function parts({ content, images }, urls) {
  const shown = images.map(({ id, name }) => (urls.has(id)
    ? { type: "image_url", image_url: { url: urls.get(id) } }
    : { type: "text", text: `(The image ${name} is no longer available.)` }));
  return content.trim() ? [...shown, { type: "text", text: content }] : shown;
}

// The images of some messages.
export function imagesOf(nodes) {
  return nodes.flatMap((node) => node.images ?? []);
}

// Validate a stored conversation, which another version or the user may have written.
export function isConversation(one) {
  const texts = (node) => typeof node?.content === "string" && (node.role === "user" || node.role === "assistant")
    && (node.images === undefined || (Array.isArray(node.images) && node.images.every(isImage)));
  return typeof one?.id === "string" && typeof one.title === "string" && typeof one.updated === "number"
    && one.nodes !== null && typeof one.nodes === "object" && Object.values(one.nodes).every(texts);
}

function isImage(one) {
  return typeof one?.id === "string" && typeof one.name === "string" && [one.bytes, one.width, one.height].every((number) => number >= 0);
}

// Read conversations that were saved as JSON, here or elsewhere as { title, messages }, and the data URLs of their
// images by id: { conversations, urls }; throws Error.
export function parseConversations(text) {
  const read = JSON.parse(text), urls = new Map();
  const found = (Array.isArray(read) ? read : [read]).map((one) => {
    if (isConversation(one?.tree) && isTree(one.tree)) {
      for (const image of imagesOf(Object.values(one.tree.nodes))) {
        const url = one.images?.[image.id];
        // Other chats keep theirs when this one is deleted.
        image.id = newId();
        if (typeof url === "string") urls.set(image.id, url);
      }
      return { ...newConversation(), ...one.tree, id: newId(), settings: textsIn(one.tree.settings) };
    }
    if (!Array.isArray(one?.messages)) throw new Error("no conversation");
    const made = newConversation();
    for (const { role, content, reasoning_content: thoughts, model } of one.messages) {
      if (typeof content !== "string" || !["user", "assistant"].includes(role)) continue;
      add(made, made.leaf, { role, content, ...(role === "assistant" ? { thoughts: String(thoughts ?? ""), model: String(model ?? ""), note: "" } : {}) });
    }
    if (typeof one.title === "string" && one.title) made.title = one.title.slice(0, 200);
    return made;
  });
  return { conversations: found.filter((one) => one.leaf), urls };
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
  const sections = [`# ${conversation.title || "Conversation"}`];
  for (const node of path(conversation)) {
    const name = node.role === "user" ? "You" : node.model || "Assistant";
    sections.push(`## ${name}`, ...imagesOf([node]).map((image) => `(${image.name})`), node.role === "user" ? node.content : splitThoughts(node.content).content);
  }
  return sections.join("\n\n") + "\n";
}

// `urls` has the data URLs of images by id.
export function asJson(conversation, urls = new Map()) {
  const shown = path(conversation).map(({ role, content, thoughts, model }) => ({ role, content, reasoning_content: thoughts, model }));
  return JSON.stringify({ title: conversation.title, messages: shown, tree: conversation, ...(urls.size ? { images: Object.fromEntries(urls) } : {}) }, null, 2) + "\n";
}
