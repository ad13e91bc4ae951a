// The settings dialog: changes apply at once and are saved; the API key is tried on Done.

import { byId, confirmed, setText } from "./dom.js";
import { apiKey, tryApiKey } from "./endpoint.js";
import { t } from "./language.js";

// Fields that each conversation may have its own of, and one that all share.
const OWN = [
  "system", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens",
  "seed", "thinking", "stop",
];
const FIELDS = [...OWN, "theme"];
const EMPTY = { all: t("(empty: model default)"), this: t("(empty: as for all chats)") };

export function applyTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export class SettingsDialog {
  // Calls `unlocked()` when the key changes and `emptied()` when all conversations are deleted.
  constructor(store, unlocked, emptied) {
    this.store = store;
    byId("scope").addEventListener("change", () => this.#fill());
    this.dialog = byId("settings");
    this.fields = FIELDS.map(byId);
    for (const field of this.fields) {
      field.addEventListener("input", () => this.#take(field));
    }
    byId("keep").checked = store.settings.keep;
    byId("keep").addEventListener("change", () => store.set({ keep: byId("keep").checked }));
    byId("settings-done").addEventListener("click", () => this.#finish(unlocked));
    byId("delete-all").addEventListener("click", async () => {
      if (!await confirmed(t("Delete all conversations in this browser?"), t("Delete all"))) return;
      store.removeAll();
      emptied();
    });
    applyTheme(store.settings.theme);
  }

  open(conversation) {
    this.conversation = conversation;
    byId("scope").value = Object.keys(conversation.settings ?? {}).length ? "this" : "all";
    this.#fill();
    byId("key").value = apiKey();
    this.dialog.showModal();
  }

  #fill() {
    const mine = byId("scope").value === "this";
    for (const field of this.fields) {
      const own = mine && field.id !== "theme";
      field.value = (own ? this.conversation.settings?.[field.id] : this.store.settings[field.id]) ?? "";
    }
    setText(byId("empty-means"), EMPTY[byId("scope").value]);
    this.#showInvalid();
  }

  async #finish(unlocked) {
    const invalid = this.#showInvalid();
    if (invalid) return invalid.focus();
    const key = byId("key");
    if (key.value.trim() !== apiKey()) {
      if (!await tryApiKey(key.value)) {
        setText(byId("settings-wrong"), t("API key: the endpoint refuses it."));
        return key.focus();
      }
      unlocked();
    }
    this.dialog.close();
  }

  #take(field) {
    this.#showInvalid();
    if (!field.checkValidity()) return;
    if (byId("scope").value === "this" && field.id !== "theme") this.#takeOwn(field);
    else this.store.set({ [field.id]: field.value });
    if (field.id === "theme") applyTheme(field.value);
  }

  #takeOwn({ id, value }) {
    const settings = { ...this.conversation.settings };
    if (value) settings[id] = value;
    else delete settings[id];
    this.conversation.settings = settings;
    if (this.store.conversations.has(this.conversation.id)) this.store.save(this.conversation);
  }

  // Mark the invalid fields and name the first, which is returned.
  #showInvalid() {
    for (const field of this.fields) field.setAttribute("aria-invalid", String(!field.checkValidity()));
    const invalid = this.fields.find((field) => !field.checkValidity());
    const name = invalid?.labels[0].firstChild.textContent.trim();
    setText(byId("settings-wrong"), invalid ? `${name}: ${invalid.validationMessage}` : "");
    return invalid;
  }
}

// Asks for the API key, once for all requests that need it.
export class KeyDialog {
  constructor(unlocked) {
    this.dialog = byId("ask");
    this.field = byId("ask-key");
    const unlock = async () => {
      const accepted = await tryApiKey(this.field.value);
      setText(byId("ask-wrong"), accepted ? "" : t("The endpoint refuses this key."));
      if (!accepted) return this.field.select();
      this.dialog.close();
      unlocked();
    };
    byId("ask-unlock").addEventListener("click", unlock);
    byId("ask-later").addEventListener("click", () => { this.refused = true; this.dialog.close(); });
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); unlock(); }
    });
  }

  // `insist`: the user started an action that needs the key.
  open(insist = false) {
    if (this.dialog.open || (this.refused && !insist) || document.querySelector("dialog[open]")) return;
    this.field.value = "";
    setText(byId("ask-wrong"), "");
    this.dialog.showModal();
  }
}
