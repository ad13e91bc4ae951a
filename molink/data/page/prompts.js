// Saved prompts: texts with names, to insert into a message or to use as a chat's system prompt.

import { byId, iconButton, make, textButton } from "./dom.js";
import { t } from "./language.js";

export class PromptsDialog {
  // `act` provides text(), insert(text) and system(text).
  constructor(store, act) {
    this.store = store;
    this.act = act;
    this.dialog = byId("prompts");
    byId("prompts-done").addEventListener("click", () => this.dialog.close());
    byId("prompt-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = byId("prompt-text").value.trim();
      if (!text) return byId("prompt-text").focus();
      store.savePrompt(byId("prompt-name").value.trim() || text.split("\n")[0].slice(0, 40), text);
      byId("prompt-text").value = byId("prompt-name").value = "";
      this.#show();
    });
  }

  // What is typed at the moment may be saved.
  open() {
    byId("prompt-text").value = this.act.text();
    this.#show();
    this.dialog.showModal();
  }

  #show() {
    const rows = this.store.settings.prompts.map(({ name, text }) => {
      const use = (word, act) => {
        const button = textButton(word, () => { this.dialog.close(); act(text); });
        button.setAttribute("aria-label", `${word}: ${name}`);
        return button;
      };
      const remove = iconButton("trash", t("Delete {name}", { name }), () => { this.store.savePrompt(name, ""); this.#show(); });
      const about = make("div", "", make("strong", "", name), make("span", "small", text.slice(0, 120)));
      return make("li", "item", about, make("div", "acts", use(t("Insert"), this.act.insert), use(t("As system prompt"), this.act.system), remove));
    });
    byId("prompt-list").replaceChildren(...rows);
    if (!rows.length) byId("prompt-list").append(make("li", "small", t("None yet: save a text that you use often.")));
  }
}
