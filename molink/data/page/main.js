// Wires the page together: input, the open conversation, and running answers.

import { Answering, firstToken } from "./answering.js";
import { Attachments, showImage } from "./attachments.js";
import { byId, icon, make, say, setText } from "./dom.js";
import { call, takeOwnerToken } from "./endpoint.js";
import { FirstStart } from "./first_start.js";
import { Manage } from "./manage.js";
import { PromptsDialog } from "./prompts.js";
import { KeyDialog, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { browserStorage, Store } from "./store.js";
import { Swarm, whyWaiting } from "./swarm.js";
import { add, choose, imagesOf, path, splitThoughts } from "./tree.js";
import { fit, MessageList } from "./message_list.js";
import { language, t, translatePage } from "./language.js";
import { fixed } from "./units.js";

translatePage();
const NEW = "new";
// Address of the view "Swarm".
const MANAGE = "#swarm";
// Seconds between saves of a running answer.
const SAVE_INTERVAL_S = 2;

const store = new Store(browserStorage());
const answers = new Map();
const text = byId("text"), send = byId("send"), scroll = byId("scroll");
const isOwnerLink = takeOwnerToken();
let managing = false;
let conversation = addressed();

for (const [id, name] of [["open-list", "list"], ["fresh", "plus"], ["open-settings", "gear"], ["open-prompts", "book"]]) byId(id).append(icon(name));
const sendIcon = icon("send"), stopIcon = icon("stop");

const messageList = new MessageList(byId("log"), {
  edit: (node, content) => { question(node.parent, content, node.images); },
  retry: (node) => {
    // An empty answer is not worth keeping as a version.
    if (!node.content && !node.thoughts) delete conversation.nodes[node.id];
    answer(node.parent);
  },
  more: (node) => { run(node); },
  choose: (node) => { choose(conversation, node); store.save(conversation); show(); },
  draft: (name) => store.draft(name),
  setDraft: (name, words) => store.setDraft(name, words),
  image: (image) => {
    const box = make("span", "");
    store.images.get(image.id).then((blob) => {
      const follow = atEnd();
      box.replaceChildren(showImage(image, blob));
      if (follow) toEnd();
    });
    return box;
  },
});
const attachments = new Attachments({
  draft: () => draftName(),
  images: () => imagesOf(path(conversation)),
  sees: () => seeing.has(models.value),
}, () => showSend());
const sidebar = new Sidebar(store, {
  open: (id) => { open(store.conversations.get(id)); if (narrow.matches) panel("list", false); text.focus(); },
  removed: (id) => { answers.get(id)?.stop(); if (id === conversation.id) open(store.create()); },
  renamed: () => show(),
  answers: (id) => answers.has(id),
});
const unlocked = () => { loadModels(); swarm.refresh(); };
const keyDialog = new KeyDialog(unlocked);
const settings = new SettingsDialog(store, unlocked, () => { for (const one of answers.values()) one.stop(); open(store.create()); });
const swarm = new Swarm();
const manage = new Manage(() => swarm.refresh());
const firstStart = new FirstStart(messageList.offers, (model) => { view(true); manage.update(swarm.summary); manage.start(model, "serve"); });
const prompts = new PromptsDialog(store, {
  text: () => text.value,
  insert: (words) => { text.value = words; text.dispatchEvent(new Event("input")); text.focus(); },
  system: (words) => {
    conversation.settings = { ...conversation.settings, system: words };
    if (store.conversations.has(conversation.id)) store.save(conversation);
    say(t("This chat has that system prompt."));
  },
});
byId("open-prompts").addEventListener("click", () => prompts.open());
const narrow = window.matchMedia("(max-width: 60rem)");

// --- the views ---

// Show the swarm's view, or the conversation.
function view(swarms) {
  if (swarms === managing) return;
  managing = swarms;
  byId("manage").hidden = !swarms;
  document.querySelector("main").hidden = swarms;
  document.body.classList.toggle("managing", swarms);
  swarm.watch("view", swarms);
  showTitle();
  if (!swarms) return;
  if (location.hash !== MANAGE) history.pushState(null, "", MANAGE);
  for (const id of ["list", "swarm"]) if (narrow.matches) panel(id, false);
  byId("manage").focus({ preventScroll: true });
}

function showTitle() {
  const title = managing ? t("Swarm") : conversation.title;
  document.title = title ? `${title} · molink` : "molink";
}

byId("open-manage").addEventListener("click", () => view(true));
byId("close-manage").addEventListener("click", () => { open(conversation); text.focus(); });

// --- the conversation -----------------------------------------------------------------------------

function draftName() {
  return conversation.leaf ? conversation.id : NEW;
}

// Each chat has an address, so that a reload shows it again and Back returns to the one before.
function address(one) {
  return one.leaf ? `#chat/${one.id}` : "";
}

function addressed() {
  return [...store.conversations.values()].find((one) => address(one) === location.hash) ?? store.create();
}

function open(wanted) {
  view(false);
  if (address(wanted) !== location.hash) history.pushState(null, "", address(wanted) || location.pathname);
  conversation = wanted;
  text.value = store.draft(draftName());
  show();
  attachments.show();
  fit(text);
  toEnd();
}

function showSend() {
  send.disabled = !answers.has(conversation.id) && !text.value.trim() && !attachments.images.length;
}

function show() {
  if (!managing && address(conversation) !== location.hash) history.replaceState(null, "", address(conversation) || location.pathname);
  showTitle();
  const follow = atEnd();
  messageList.show(conversation, answers.get(conversation.id));
  sidebar.show(conversation.id);
  const busy = answers.has(conversation.id);
  send.replaceChildren(busy ? stopIcon : sendIcon);
  send.setAttribute("aria-label", busy ? t("Stop") : t("Send"));
  showSend();
  swarm.expect(answers.size);
  showProgress();
  showContext();
  if (follow) toEnd();
}

function question(parent, content, images = []) {
  const node = add(conversation, parent, { role: "user", content, ...(images.length ? { images } : {}) });
  answer(node.id);
}

function answer(parent) {
  run(add(conversation, parent, { role: "assistant", model: byId("model").value }));
}

// Request an answer into `node`, or its continuation if it has text.
function run(node) {
  const mine = conversation;
  node.note = undefined;
  store.save(mine);
  let savedAt = performance.now();
  const answering = new Answering(mine, node, store, () => {
    if (performance.now() - savedAt > SAVE_INTERVAL_S * 1000) {
      savedAt = performance.now();
      if (store.conversations.has(mine.id)) store.save(mine);
    }
    if (mine !== conversation) return;
    const follow = atEnd();
    messageList.grow(answering);
    if (follow) toEnd();
  }, (problem) => ended(mine, node, problem));
  answers.set(mine.id, answering);
  show();
  toEnd();
}

function ended(mine, node, problem) {
  answers.delete(mine.id);
  if (store.conversations.has(mine.id)) store.save(mine);
  show();
  if (mine === conversation && !problem) say(`${t("Answer")}: ${splitThoughts(node.content).content.slice(0, 1000)}`);
  if (problem?.status === 401) keyDialog.open(true);
}

// Show how much of the model's context the conversation takes.
function showContext() {
  const last = path(conversation).findLast((node) => node.context);
  const all = contexts.get(last?.model);
  const [used, whole] = [last?.context ?? 0, all ?? 0].map((number) => number.toLocaleString(language));
  const shown = all ? t("{used} of {whole} tokens of context used", { used, whole }) : t("{used} tokens of context used", { used });
  setText(byId("context"), last ? shown : "");
  byId("context").classList.toggle("wrong", Boolean(all) && last.context > 0.9 * all);
}

// Show why the first token is late, then the token rate.
function showProgress() {
  const answering = answers.get(conversation.id);
  const view = answering && messageList.views.get(answering.node.id);
  if (!view) return;
  const rate = answering.rate ? ` · ${fixed(answering.rate, 1)} ${t("tokens/s")}` : "";
  if (answering.first) view.showState(firstToken(answering) + rate);
  else view.showState(answering.elapsed < 0.5 ? "" : whyWaiting(swarm.summary, answering.node.model, answering.elapsed));
}
setInterval(showProgress, 500);

// --- scrolling ------------------------------------------------------------------------------------

function atEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
}

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

scroll.addEventListener("scroll", () => { byId("to-end").hidden = atEnd(); }, { passive: true });
byId("to-end").addEventListener("click", () => { toEnd(); text.focus({ preventScroll: true }); });

// --- input ----------------------------------------------------------------------------------------

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const running = answers.get(conversation.id);
  if (running) { running.stop(); return; }
  const content = text.value.trim();
  const attached = attachments.pop();
  if (!content && !attached.length) return;
  store.setDraft(draftName(), "");
  text.value = "";
  fit(text);
  for (const { id, blob } of attached) store.addImage(id, blob);
  question(conversation.leaf, content, attached.map(({ blob, ...image }) => image));
});
text.addEventListener("input", () => {
  store.setDraft(draftName(), text.value);
  fit(text);
  showSend();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answers.has(conversation.id)) byId("form").requestSubmit();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "ArrowUp" || text.value) return;
  const edits = document.querySelectorAll("#log .mine [data-act='edit']:enabled");
  if (!edits.length) return;
  event.preventDefault();
  edits[edits.length - 1].click();
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    const running = answers.get(conversation.id);
    const shown = ["list", "swarm"].find((id) => narrow.matches && !byId(id).hidden);
    if (shown) panel(shown, false);
    else if (running) running.stop();
  }
  const shortcut = SHORTCUTS[`${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`];
  if ((event.ctrlKey || event.metaKey) && shortcut) { event.preventDefault(); shortcut(); }
});
const SHORTCUTS = {
  "shift+o": () => fresh(),
  "shift+m": () => (managing ? open(conversation) : view(true)),
  "k": () => { panel("list", true); byId("find-chat").select(); },
  ",": () => settings.open(conversation),
};

function fresh() {
  open(store.create());
  if (narrow.matches) panel("list", false);
  text.focus();
}
byId("fresh").addEventListener("click", fresh);

// --- panels ---------------------------------------------------------------------------------------

function panel(id, shown) {
  const button = byId(`open-${id}`), side = byId(id);
  const hadFocus = side.contains(document.activeElement);
  side.hidden = !shown;
  button.setAttribute("aria-expanded", String(shown));
  if (shown && narrow.matches) panel(id === "list" ? "swarm" : "list", false);
  if (hadFocus) button.focus();
  if (id === "swarm") swarm.watch("panel", shown);
  cover();
}

// On a narrow page an open panel covers the conversation.
function cover() {
  const covered = narrow.matches && !(byId("list").hidden && byId("swarm").hidden);
  document.querySelector("main").inert = byId("manage").inert = covered;
}
narrow.addEventListener("change", cover);

for (const id of ["list", "swarm"]) {
  byId(`open-${id}`).addEventListener("click", () => {
    if (id === "swarm" && managing) return open(conversation);
    panel(id, byId(id).hidden);
    store.set({ panels: { list: !byId("list").hidden, swarm: !byId("swarm").hidden } });
  });
}
byId("open-settings").addEventListener("click", () => settings.open(conversation));

// --- models ---------------------------------------------------------------------------------------

const models = byId("model");
// Tokens of each model's context, and the models that take images.
const contexts = new Map(), seeing = new Set();
let modelsLoadedAt = 0;

async function loadModels() {
  modelsLoadedAt = performance.now();
  let names;
  try {
    const { data } = await (await call("/v1/models")).json();
    names = data.map((model) => String(model.id));
    for (const model of data) {
      contexts.set(String(model.id), Number(model.max_model_len) || 0);
      if (model.capabilities?.vision) seeing.add(String(model.id));
      else seeing.delete(String(model.id));
    }
    showContext();
  } catch (error) {
    if (error.status === 401) keyDialog.open();
    return;
  }
  if (models.options.length && names.join("\n") === [...models.options].map((option) => option.value).join("\n")) return;
  const wanted = models.value || store.settings.model;
  models.replaceChildren(...names.map((name) => {
    const option = make("option", "", name);
    option.value = name;
    return option;
  }));
  if (!names.length) {
    models.append(make("option", "", t("No model served")));
    models.options[0].value = "";
  }
  models.disabled = !names.length;
  if (names.includes(wanted)) models.value = wanted;
  attachments.show();
}

models.addEventListener("change", () => { store.set({ model: models.value }); attachments.show(); });
swarm.addEventListener("refreshed", (event) => {
  showProgress();
  if (managing) manage.update(swarm.summary, event.detail);
  if (!event.detail) firstStart.update(swarm.summary);
  const served = (swarm.summary?.rings ?? []).map((ring) => ring.model).sort().join("\n");
  if (event.detail?.status === 401) keyDialog.open();
  if (served !== models.dataset.served || performance.now() - modelsLoadedAt > 9000) loadModels();
  models.dataset.served = served;
});

// --- other tabs and unload ------------------------------------------------------------------------

window.addEventListener("storage", (event) => {
  store.changedElsewhere(event.key, answers.has(conversation.id) || text === document.activeElement ? conversation.id : "");
  const now = store.conversations.get(conversation.id);
  if (now && now !== conversation) open(now);
});
for (const kind of ["beforeunload", "pagehide"]) {
  window.addEventListener(kind, () => {
    for (const one of answers.values()) {
      one.left = true;
      if (store.conversations.has(one.conversation.id)) store.save(one.conversation);
    }
  });
}

window.addEventListener("popstate", () => {
  if (takeOwnerToken() || location.hash === MANAGE) view(true);
  else open(addressed());
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); (managing ? byId("manage") : text).focus(); });

const panels = store.settings.panels ?? { list: false, swarm: false };
const atManage = isOwnerLink || location.hash === MANAGE;
if (atManage) { show(); view(true); }
else open(conversation);
panel("list", Boolean(panels.list) && !narrow.matches);
panel("swarm", Boolean(panels.swarm) && !narrow.matches);
loadModels();
setText(byId("announcement"), "");
