// The list of conversations and their actions.

import { arrange, byId, confirmed, download, iconButton, make, setText } from "./dom.js";
import { asJson, asMarkdown } from "./tree.js";

export class Sidebar {
  // `act` provides open(id), removed(id), answers(id).
  constructor(store, act) {
    this.store = store;
    this.act = act;
    this.rows = new Map();
    this.list = byId("conversations");
    store.addEventListener("change", () => this.show(this.current));
  }

  show(current) {
    this.current = current;
    const rows = new Map();
    for (const one of this.store.sorted()) {
      const row = this.rows.get(one.id) ?? this.#make(one.id);
      setText(row.title, one.title || "New chat");
      row.title.classList.toggle("busy", this.act.answers(one.id));
      if (one.id === current) row.title.setAttribute("aria-current", "true");
      else row.title.removeAttribute("aria-current");
      rows.set(one.id, row);
    }
    this.rows = rows;
    arrange(this.list, [...rows.values()].map((row) => row.element));
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
    const name = () => (find().title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    const markdown = iconButton("save", "Save as Markdown", () => download(`${name()}.md`, "text/markdown", asMarkdown(find())));
    const json = make("button", "icon words", "{ }");
    json.type = "button";
    json.title = "Save as JSON";
    json.setAttribute("aria-label", "Save as JSON");
    json.addEventListener("click", () => download(`${name()}.json`, "application/json", asJson(find())));
    const remove = iconButton("trash", "Delete", async () => {
      if (!await confirmed(`Delete “${find().title || "New chat"}”?`, "Delete")) return;
      this.store.remove(id);
      this.act.removed(id);
    });
    return { title, element: make("li", "", title, make("span", "tools", markdown, json, remove)) };
  }
}
