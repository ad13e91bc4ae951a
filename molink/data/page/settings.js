// The settings dialog: changes apply at once and are saved; the API key is tried on Done.

import { byId, confirmed, setText } from "./dom.js";
import { apiKey, tryApiKey } from "./endpoint.js";

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "theme"];

export function applyTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export class SettingsDialog {
  // Calls `unlocked()` when the key changes and `emptied()` when all conversations are deleted.
  constructor(store, unlocked, emptied) {
    this.store = store;
    this.dialog = byId("settings");
    this.fields = FIELDS.map(byId);
    for (const field of this.fields) {
      field.addEventListener("input", () => this.#take(field));
    }
    byId("keep").checked = store.settings.keep;
    byId("keep").addEventListener("change", () => store.set({ keep: byId("keep").checked }));
    byId("settings-done").addEventListener("click", () => this.#finish(unlocked));
    byId("delete-all").addEventListener("click", async () => {
      if (!await confirmed("Delete all conversations in this browser?", "Delete all")) return;
      store.removeAll();
      emptied();
    });
    applyTheme(store.settings.theme);
  }

  open() {
    for (const field of this.fields) field.value = this.store.settings[field.id];
    byId("key").value = apiKey();
    this.#showInvalid();
    this.dialog.showModal();
  }

  async #finish(unlocked) {
    const invalid = this.#showInvalid();
    if (invalid) return invalid.focus();
    const key = byId("key");
    if (key.value.trim() !== apiKey()) {
      if (!await tryApiKey(key.value)) {
        setText(byId("settings-wrong"), "API key: the endpoint refuses it.");
        return key.focus();
      }
      unlocked();
    }
    this.dialog.close();
  }

  #take(field) {
    this.#showInvalid();
    if (!field.checkValidity()) return;
    this.store.set({ [field.id]: field.value });
    if (field.id === "theme") applyTheme(field.value);
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
      setText(byId("ask-wrong"), accepted ? "" : "The endpoint refuses this key.");
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
