// The list of conversations and their actions.

import { arrange, byId, confirmed, download, iconButton, make, setText, textButton } from "./dom.js";
import { asJson, asMarkdown, parseConversations, textOf } from "./tree.js";
import { t } from "./language.js";

// Larger files are not read.
const MAX_IMPORT_BYTES = 200_000_000;

export class Sidebar {
  // `act` provides open(id), removed(id), answers(id).
  constructor(store, act) {
    this.store = store;
    this.act = act;
    this.rows = new Map();
    this.list = byId("conversations");
    const save = (kind, ending, type, write) => textButton(kind, async () => {
      const one = store.conversations.get(this.current);
      const name = (one.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
      download(`${name}.${ending}`, type, await write(one));
    });
    const json = async (one) => asJson(one, await store.imageUrls(Object.values(one.nodes)));
    byId("save-as").append(save("Markdown", "md", "text/markdown", asMarkdown), save("JSON", "json", "application/json", json));
    byId("save-all").addEventListener("click", async () => {
      const all = [];
      for (const one of store.sorted()) all.push((await json(one)).trim());
      download("molink-conversations.json", "application/json", `[\n${all.join(",\n")}\n]\n`);
    });
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", () => this.#import(byId("import-file")));
    byId("find-chat").addEventListener("input", () => this.show(this.current));
    store.addEventListener("change", () => this.show(this.current));
  }

  show(current) {
    this.current = current;
    const rows = new Map();
    const words = byId("find-chat").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (one) => !words.length || words.every((word) => textOf(one).toLowerCase().includes(word));
    for (const one of this.store.sorted().filter(matches)) {
      const row = this.rows.get(one.id) ?? this.#make(one.id);
      setText(row.title, one.title || t("New chat"));
      row.title.title = one.title;
      row.title.classList.toggle("busy", this.act.answers(one.id));
      if (one.id === current) row.title.setAttribute("aria-current", "true");
      else row.title.removeAttribute("aria-current");
      rows.set(one.id, row);
    }
    this.rows = rows;
    arrange(this.list, [...rows.values()].map((row) => row.element));
    byId("save-as").hidden = !this.store.conversations.has(current);
    byId("save-all").disabled = !this.store.conversations.size;
    const { keep } = this.store.settings;
    const none = words.length ? t("No conversation has these words.") : t("No conversations yet.");
    const text = rows.size ? "" : none;
    const lost = this.store.full ? t("Browser storage is full: save this conversation before you close the page.") : "";
    setText(byId("storage-state"), lost || (keep ? text : t("Conversations are not saved and are lost when this page closes.")));
  }

  #make(id) {
    const find = () => this.store.conversations.get(id);
    const title = make("button", "title");
    title.type = "button";
    title.addEventListener("click", () => this.act.open(id));
    const remove = iconButton("trash", t("Delete"), async () => {
      if (!await confirmed(t("Delete “{title}”?", { title: find().title || t("New chat") }), t("Delete"))) return;
      this.store.remove(id);
      this.act.removed(id);
    });
    const rename = iconButton("edit", t("Rename"), () => this.#rename(find(), title));
    return { title, element: make("li", "", title, make("span", "tools", rename, remove)) };
  }

  // Edit the title in place: Enter keeps it, Escape does not.
  #rename(conversation, title) {
    const field = make("input", "");
    field.value = conversation.title;
    field.maxLength = 200;
    field.setAttribute("aria-label", t("Title"));
    let open = true;
    const close = (keep) => {
      if (!open) return; // leaving the field closes it, too
      open = false;
      if (keep && field.value.trim()) conversation.title = field.value.trim();
      field.replaceWith(title);
      if (keep) this.store.save(conversation);
      this.act.renamed(conversation);
      title.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") close(true);
      if (event.key === "Escape") { event.stopPropagation(); close(false); }
    });
    field.addEventListener("blur", () => close(true));
    title.replaceWith(field);
    field.select();
  }

  async #import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      if (file.size > MAX_IMPORT_BYTES) throw new Error("too large");
      const found = parseConversations(await file.text());
      this.store.take(found);
      setText(byId("import-state"), t("{count} imported.", { count: found.conversations.length }));
    } catch {
      setText(byId("import-state"), t("{name} holds no conversations that were saved as JSON.", file));
    }
  }
}
