// The list of conversations and their actions.

import { arrange, byId, confirmed, download, iconButton, make, setText, textButton } from "./dom.js";
import { asJson, asMarkdown } from "./tree.js";

export class Sidebar {
  // `act` provides open(id), removed(id), answers(id).
  constructor(store, act) {
    this.store = store;
    this.act = act;
    this.rows = new Map();
    this.list = byId("conversations");
    const save = (kind, ending, type, write) => textButton(kind, () => {
      const one = store.conversations.get(this.current);
      const name = (one.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
      download(`${name}.${ending}`, type, write(one));
    });
    byId("save-as").append(save("Markdown", "md", "text/markdown", asMarkdown), save("JSON", "json", "application/json", asJson));
    store.addEventListener("change", () => this.show(this.current));
  }

  show(current) {
    this.current = current;
    const rows = new Map();
    for (const one of this.store.sorted()) {
      const row = this.rows.get(one.id) ?? this.#make(one.id);
      setText(row.title, one.title || "New chat");
      row.title.title = one.title;
      row.title.classList.toggle("busy", this.act.answers(one.id));
      if (one.id === current) row.title.setAttribute("aria-current", "true");
      else row.title.removeAttribute("aria-current");
      rows.set(one.id, row);
    }
    this.rows = rows;
    arrange(this.list, [...rows.values()].map((row) => row.element));
    byId("save-as").hidden = !this.store.conversations.has(current);
    const { keep } = this.store.settings;
    const words = rows.size ? "" : "No conversations yet.";
    const lost = this.store.full ? "Browser storage is full: save this conversation before you close the page." : "";
    setText(byId("storage-state"), lost || (keep ? words : "Conversations are not saved and are lost when this page closes."));
  }

  #make(id) {
    const find = () => this.store.conversations.get(id);
    const title = make("button", "title");
    title.type = "button";
    title.addEventListener("click", () => this.act.open(id));
    const remove = iconButton("trash", "Delete", async () => {
      if (!await confirmed(`Delete “${find().title || "New chat"}”?`, "Delete")) return;
      this.store.remove(id);
      this.act.removed(id);
    });
    return { title, element: make("li", "", title, make("span", "tools", remove)) };
  }
}
