// The settings dialog: changes apply at once and are saved.

import { byId, confirmed, setText } from "./dom.js";
import { apiKey, setApiKey } from "./endpoint.js";

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
      field.value = store.settings[field.id];
      field.addEventListener("input", () => this.#take(field));
    }
    byId("keep").checked = store.settings.keep;
    byId("keep").addEventListener("change", () => store.set({ keep: byId("keep").checked }));
    byId("settings-done").addEventListener("click", () => this.dialog.close());
    byId("delete-all").addEventListener("click", async () => {
      if (!await confirmed("Delete all conversations in this browser?", "Delete all")) return;
      store.removeAll();
      emptied();
    });
    this.dialog.addEventListener("close", () => {
      if (byId("key").value.trim() === apiKey()) return;
      setApiKey(byId("key").value);
      unlocked();
    });
    applyTheme(store.settings.theme);
  }

  open() {
    byId("key").value = apiKey();
    this.dialog.showModal();
  }

  #take(field) {
    const valid = field.checkValidity();
    field.setAttribute("aria-invalid", String(!valid));
    const wrong = this.fields.find((one) => !one.checkValidity());
    const name = wrong?.labels[0].firstChild.textContent.trim();
    setText(byId("settings-wrong"), wrong ? `${name}: ${wrong.validationMessage}` : "");
    if (!valid) return;
    this.store.set({ [field.id]: field.value });
    if (field.id === "theme") applyTheme(field.value);
  }
}

// Asks for the API key, once for all requests that need it.
export class KeyDialog {
  constructor(unlocked) {
    this.dialog = byId("ask");
    this.field = byId("ask-key");
    const unlock = () => {
      setApiKey(this.field.value);
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
    this.dialog.showModal();
  }
}
