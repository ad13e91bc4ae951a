// Browser storage for conversations, drafts and settings. Bounded; falls back to memory where
// storage is blocked.

import { fromDataUrl, ImageStore, toDataUrl } from "./images.js";
import { imagesOf, isConversation, newConversation, NOT_COMPLETE } from "./tree.js";

const CONVERSATION = "molink.conversation.", DRAFT = "molink.draft.", SETTINGS = "molink.settings";
const MAX_CONVERSATIONS = 200, MAX_CHARACTERS = 3_000_000;

const DEFAULTS = {
  model: "", system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", presence_penalty: "",
  frequency_penalty: "", repetition_penalty: "", stop: "", thinking: "", theme: "", keep: true, panels: null, prompts: [],
};
const MAX_PROMPTS = 100, MAX_PROMPT_CHARACTERS = 20_000;

export class Store extends EventTarget {
  constructor(storage) {
    super();
    this.storage = storage;
    this.settings = { ...DEFAULTS, ...this.#read(SETTINGS, {}) };
    this.conversations = new Map();
    this.drafts = new Map();
    this.sizes = new Map();
    this.full = false;
    this.images = new ImageStore();
    for (const name of this.#names()) {
      if (name.startsWith(CONVERSATION)) this.#take(name);
      else if (name.startsWith(DRAFT)) this.drafts.set(name.slice(DRAFT.length), this.storage.getItem(name));
    }
  }

  // Take over a change from another tab, except to the conversation that is open here.
  changedElsewhere(name, open) {
    if (!name?.startsWith(CONVERSATION) || name === CONVERSATION + open) return;
    const id = name.slice(CONVERSATION.length);
    this.conversations.delete(id);
    this.sizes.delete(id);
    this.#take(name);
    this.#changed();
  }

  sorted() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  create() {
    return newConversation();
  }

  save(conversation) {
    const isNew = !this.conversations.has(conversation.id);
    this.conversations.set(conversation.id, conversation);
    if (this.settings.keep) this.#keep(conversation);
    if (isNew) this.#changed();
  }

  remove(id) {
    this.#evict(id);
    for (const name of [...this.drafts.keys()]) if (name.startsWith(id)) this.setDraft(name, "");
    this.#changed();
  }

  removeAll() {
    for (const id of [...this.conversations.keys()]) this.remove(id);
    for (const name of [...this.drafts.keys()]) this.setDraft(name, "");
  }

  set(changes) {
    Object.assign(this.settings, changes);
    this.#write(SETTINGS, this.settings);
    if ("keep" in changes) {
      for (const one of this.conversations.values()) {
        if (changes.keep) this.#keep(one);
        else this.#erase(CONVERSATION + one.id);
      }
      for (const [name, text] of this.drafts) this.setDraft(name, text);
      const nodes = [...this.conversations.values()].flatMap((one) => Object.values(one.nodes));
      this.images.setKept(imagesOf(nodes).map((one) => one.id), changes.keep);
    }
    this.#changed();
  }

  async addImage(id, blob) {
    const { keep } = this.settings;
    if (await this.images.put(id, blob, keep) === keep) return;
    this.full = true;
    this.#changed();
  }

  // The data URLs of the images of some messages, by id; without those that are lost.
  async imageUrls(nodes) {
    const found = new Map();
    for (const { id } of imagesOf(nodes)) {
      const blob = await this.images.get(id);
      if (blob) found.set(id, await toDataUrl(blob));
    }
    return found;
  }

  // Add conversations and images as `parseConversations` returns them.
  take({ conversations, urls }) {
    for (const [id, url] of urls) {
      const blob = fromDataUrl(url);
      if (blob) this.addImage(id, blob);
    }
    for (const one of conversations) this.save(one);
  }

  // The settings of a conversation: its own where it has some.
  settingsOf(conversation) {
    return { ...this.settings, ...conversation.settings };
  }

  // Keep a text under a name, in place of one with that name; an empty text removes it.
  savePrompt(name, text) {
    const others = this.settings.prompts.filter((one) => one.name !== name);
    const added = text ? [{ name: name.slice(0, 80), text: text.slice(0, MAX_PROMPT_CHARACTERS) }] : [];
    this.set({ prompts: [...added, ...others].slice(0, MAX_PROMPTS) });
  }

  draft(name) {
    return this.drafts.get(name) ?? "";
  }

  setDraft(name, text) {
    if (text) this.drafts.set(name, text);
    else this.drafts.delete(name);
    if (text && this.settings.keep) this.#put(DRAFT + name, text);
    else this.#erase(DRAFT + name);
  }

  // --- the storage ---

  #changed() {
    this.dispatchEvent(new Event("change"));
  }

  #take(name) {
    const one = this.#read(name, null);
    if (isConversation(one) && name === CONVERSATION + one.id) {
      for (const node of Object.values(one.nodes)) {
        if (node.role !== "assistant" || node.note !== undefined) continue;
        node.note = NOT_COMPLETE;
        node.cut = Boolean(node.content);
      }
      this.conversations.set(one.id, one);
      this.sizes.set(one.id, this.storage.getItem(name).length);
    }
  }

  #keep(conversation) {
    const text = JSON.stringify(conversation);
    this.sizes.set(conversation.id, text.length);
    this.#evictOverflow(conversation.id);
    this.full = true;
    // The quota differs between browsers: delete the oldest until this one fits.
    while (!this.#put(CONVERSATION + conversation.id, text)) {
      if (!this.#evictOldest(conversation.id)) return;
    }
    this.full = false;
  }

  #evictOverflow(but) {
    const sum = () => [...this.sizes.values()].reduce((a, b) => a + b, 0);
    while (this.conversations.size > MAX_CONVERSATIONS || sum() > MAX_CHARACTERS) {
      if (!this.#evictOldest(but)) return;
    }
  }

  #evictOldest(but) {
    const oldest = this.sorted().reverse().find((one) => one.id !== but && this.sizes.has(one.id));
    if (!oldest) return false;
    this.#evict(oldest.id);
    this.#changed();
    return true;
  }

  #evict(id) {
    this.images.remove(imagesOf(Object.values(this.conversations.get(id)?.nodes ?? {})).map((one) => one.id));
    this.conversations.delete(id);
    this.sizes.delete(id);
    this.#erase(CONVERSATION + id);
  }

  #names() {
    try {
      return Object.keys(this.storage);
    } catch {
      return [];
    }
  }

  #read(name, otherwise) {
    try {
      return JSON.parse(this.storage.getItem(name)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  #write(name, value) {
    return this.#put(name, JSON.stringify(value));
  }

  #put(name, text) {
    try {
      this.storage.setItem(name, text);
      return true;
    } catch {
      return false;
    }
  }

  #erase(name) {
    try {
      this.storage.removeItem(name);
    } catch { /* storage is blocked */ }
  }
}

// The local storage, or null where it is blocked.
export function browserStorage() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
