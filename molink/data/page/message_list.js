// Renders the messages of a conversation. A message keeps its DOM node while it is shown, so that
// streaming never disturbs focus, selection or typing.

import { arrange, copyButton, iconButton, make, setSentence, setText, textButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { path, splitThoughts, versions } from "./tree.js";
import { t } from "./language.js";

export class MessageList {
  // `act` provides edit(node, text), retry(node), more(node), choose(node), draft(name), setDraft(name, text), and
  // image(image): an element that shows it.
  constructor(log, act) {
    this.log = log;
    this.act = act;
    this.views = new Map();
    this.empty = make("div", "hello", make("strong", "", t("What would you like to know?")),
      t("Answers are computed by the PCs of your swarm. Conversations stay in this browser."));
    // Where models are offered if none is served.
    this.offers = make("div", "");
    this.empty.append(this.offers);
  }

  show(conversation, answering) {
    const nodes = path(conversation);
    const shown = new Map();
    for (const node of nodes) {
      const kept = this.views.get(node.id);
      const view = kept?.node === node ? kept : new (node.role === "user" ? Question : Answer)(node, conversation, this.act);
      view.update(versions(conversation, node), answering);
      shown.set(node.id, view);
    }
    this.views = shown;
    arrange(this.log, nodes.length ? [...shown.values()].map((view) => view.element) : [this.empty]);
  }

  // Update only the running answer.
  grow(answering) {
    this.views.get(answering.node.id)?.grow(answering);
  }
}

// Switches between versions of a message.
class Versions {
  constructor(act) {
    this.act = act;
    this.word = make("span", "small");
    this.before = iconButton("back", t("Earlier version"), () => this.#go(-1));
    this.after = iconButton("forward", t("Later version"), () => this.#go(1));
    this.element = make("span", "versions", this.before, this.word, this.after);
  }

  update(all, node, frozen) {
    this.all = all;
    this.at = all.indexOf(node);
    this.element.hidden = all.length < 2;
    this.before.disabled = frozen || this.at === 0;
    this.after.disabled = frozen || this.at === all.length - 1;
    setText(this.word, `${this.at + 1} / ${all.length}`);
  }

  #go(step) {
    const wanted = this.all[this.at + step];
    if (wanted) this.act.choose(wanted);
  }
}

class Question {
  constructor(node, conversation, act) {
    this.node = node;
    this.act = act;
    this.draft = `${conversation.id}/${node.id}`;
    this.versions = new Versions(act);
    this.editButton = iconButton("edit", t("Edit this message"), () => this.#edit(this.node.content));
    this.editButton.dataset.act = "edit";
    this.bubble = make("div", "bubble", node.content);
    this.bubble.hidden = !node.content;
    this.images = make("ul", "thumbnails", ...(node.images ?? []).map((one) => make("li", "", act.image(one))));
    this.tools = make("div", "tools", this.versions.element, this.editButton, copyButton(t("Copy this message"), () => node.content));
    this.element = make("article", "turn mine", this.images, this.bubble, this.tools);
    this.element.setAttribute("aria-label", t("You"));
    const begun = act.draft(this.draft);
    if (begun) this.#edit(begun, false);
  }

  update(all, answering) {
    this.versions.update(all, this.node, Boolean(answering));
    this.editButton.disabled = Boolean(answering);
  }

  grow() {}

  #edit(text, focus = true) {
    const area = make("textarea", "");
    area.value = text;
    area.setAttribute("aria-label", t("Edited message"));
    area.addEventListener("input", () => { this.act.setDraft(this.draft, area.value); fit(area); });
    const send = () => {
      if (!area.value.trim() && !this.node.images?.length) return;
      this.#close();
      this.act.edit(this.node, area.value.trim());
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); this.#close(); this.editButton.focus(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    const buttons = make("div", "row",
      textButton(t("Cancel"), () => { this.#close(); this.editButton.focus(); }), textButton(t("Send"), send, "main"));
    this.editor = make("div", "editor", area, buttons);
    this.element.replaceChildren(this.images, this.editor);
    if (focus) area.focus();
    requestAnimationFrame(() => fit(area));
  }

  #close() {
    this.act.setDraft(this.draft, "");
    this.element.replaceChildren(this.images, this.bubble, this.tools);
  }
}

class Answer {
  constructor(node, conversation, act) {
    this.node = node;
    this.act = act;
    this.body = make("div", "body");
    this.markdown = new MarkdownView(this.body, node.plain);
    this.thought = make("div", "thought");
    this.summary = make("summary", "", t("Reasoning"));
    this.thoughts = make("details", "thoughts", this.summary, this.thought);
    this.state = make("p", "note");
    this.problem = make("div", "problem");
    this.problem.setAttribute("role", "alert");
    this.sentence = make("span", "");
    this.retry = textButton(t("Try again"), () => act.retry(node));
    this.problem.append(this.sentence, this.retry);
    this.regenerate = iconButton("retry", t("Regenerate"), () => act.retry(node));
    this.more = textButton(t("Continue"), () => act.more(node));
    this.versions = new Versions(act);
    const copy = copyButton(t("Copy this answer"), () => splitThoughts(node.content).content);
    this.tools = make("div", "tools", this.versions.element, this.regenerate, copy, this.more);
    this.element = make("article", "turn theirs", this.thoughts, this.body, this.problem, this.state, this.tools);
    this.element.setAttribute("aria-label", t("Answer"));
    this.painted = -Infinity;
  }

  update(all, answering) {
    const mine = answering?.node === this.node;
    this.versions.update(all, this.node, Boolean(answering));
    this.regenerate.disabled = this.retry.disabled = Boolean(answering);
    this.tools.hidden = mine;
    this.more.hidden = !this.node.cut || mine;
    this.more.disabled = Boolean(answering);
    this.#paint(mine ? answering : null);
    setText(this.state, mine ? "" : t(this.node.note ?? ""));
    const text = mine ? "" : this.node.problem ?? "";
    this.problem.hidden = !text;
    setSentence(this.sentence, text);
  }

  // Long answers are parsed less often.
  grow(answering) {
    const now = performance.now();
    const pause = Math.min(1000, this.node.content.length / 100);
    clearTimeout(this.later);
    if (now - this.painted < pause) this.later = setTimeout(() => this.grow(answering), pause);
    else if (answering.node.note === undefined) this.#paint(answering);
  }

  #paint(answering) {
    this.painted = performance.now();
    clearTimeout(this.later);
    const split = splitThoughts(this.node.content);
    const thoughts = (this.node.thoughts ?? "") + split.thoughts;
    const begun = Boolean(split.content);
    this.thoughts.hidden = !thoughts;
    if (thoughts) setText(this.thought, thoughts);
    setText(this.summary, answering && !begun ? t("Thinking…") : t("Reasoning"));
    this.body.hidden = !begun;
    if (begun) this.markdown.show(split.content, !answering);
    if (this.markdown.plain) this.node.plain = true; // also after a reload
    this.element.classList.toggle("live", Boolean(answering));
  }

  // Show progress or the reason for waiting.
  showState(text) {
    setText(this.state, text);
  }
}

// Fit the height of a text area to its text.
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
