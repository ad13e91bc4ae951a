// Puts the page together: what is typed, which conversation is shown, which answers come.

import { Answering } from "./answering.js";
import { byId, icon, make, say, setText } from "./dom.js";
import { call } from "./endpoint.js";
import { KeyDialog, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { browserStorage, Store } from "./store.js";
import { Swarm, whyWaiting } from "./swarm.js";
import { add, choose, splitThoughts } from "./tree.js";
import { fit, Turns } from "./turns.js";

const NEW = "new";
// Seconds between two times that an answer under way is kept.
const KEEP_S = 2;

const store = new Store(browserStorage());
const answers = new Map();
const text = byId("text"), send = byId("send"), scroll = byId("scroll");
let conversation = store.create();

for (const [id, name] of [["open-list", "list"], ["fresh", "plus"], ["open-settings", "gear"]]) byId(id).append(icon(name));
const sendIcon = icon("send"), stopIcon = icon("stop");

const turns = new Turns(byId("log"), {
  edit: (node, content) => { question(node.parent, content); },
  again: (node) => {
    // Of an answer without a word nothing is to be kept.
    if (!node.content && !node.thoughts) delete conversation.nodes[node.id];
    answer(node.parent);
  },
  choose: (node) => { choose(conversation, node); store.save(conversation); show(); },
  draft: (name) => store.draft(name),
  setDraft: (name, words) => store.setDraft(name, words),
});
const sidebar = new Sidebar(store, {
  open: (id) => { open(store.conversations.get(id)); if (narrow.matches) panel("list", false); text.focus(); },
  removed: (id) => { answers.get(id)?.stop(); if (id === conversation.id) open(store.create()); },
  answers: (id) => answers.has(id),
});
const unlocked = () => { loadModels(); swarm.look(); };
const keyDialog = new KeyDialog(unlocked);
const settings = new SettingsDialog(store, unlocked, () => { for (const one of answers.values()) one.stop(); open(store.create()); });
const swarm = new Swarm();
const narrow = window.matchMedia("(max-width: 60rem)");

// --- the conversation -----------------------------------------------------------------------------

function draftName() {
  return conversation.leaf ? conversation.id : NEW;
}

function open(wanted) {
  conversation = wanted;
  text.value = store.draft(draftName());
  show();
  fit(text);
  toEnd();
}

function show() {
  const follow = atEnd();
  turns.show(conversation, answers.get(conversation.id));
  sidebar.show(conversation.id);
  const busy = answers.has(conversation.id);
  send.replaceChildren(busy ? stopIcon : sendIcon);
  send.setAttribute("aria-label", busy ? "Stop" : "Send");
  send.disabled = !busy && !text.value.trim();
  swarm.expect(answers.size);
  tellWaiting();
  if (follow) toEnd();
}

function question(parent, content) {
  const node = add(conversation, parent, { role: "user", content });
  answer(node.id);
}

function answer(parent) {
  const mine = conversation;
  const node = add(mine, parent, { role: "assistant", model: byId("model").value });
  store.save(mine);
  let kept = performance.now();
  const answering = new Answering(mine, node, store.settings, () => {
    if (performance.now() - kept > KEEP_S * 1000) {
      kept = performance.now();
      if (store.conversations.has(mine.id)) store.save(mine);
    }
    if (mine !== conversation) return;
    const follow = atEnd();
    turns.grow(answering);
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
  if (mine === conversation && !problem) say(`Answer: ${splitThoughts(node.content).content.slice(0, 1000)}`);
  if (problem?.status === 401) keyDialog.open(true);
}

// Before the first token: why there is none. Then: how fast it is.
function tellWaiting() {
  const answering = answers.get(conversation.id);
  const turn = answering && turns.turns.get(answering.node.id);
  if (!turn) return;
  const pace = answering.pace ? ` · ${answering.pace.toFixed(1)} per second` : "";
  if (answering.first) turn.wait(`first token after ${((answering.first - answering.started) / 1000).toFixed(2)} s${pace}`);
  else turn.wait(answering.elapsed < 0.5 ? "" : whyWaiting(swarm.told, answering.node.model, answering.elapsed));
}
setInterval(tellWaiting, 500);

// --- scrolling ------------------------------------------------------------------------------------

function atEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
}

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

scroll.addEventListener("scroll", () => { byId("to-end").hidden = atEnd(); }, { passive: true });
byId("to-end").addEventListener("click", () => { toEnd(); text.focus({ preventScroll: true }); });

// --- what is typed --------------------------------------------------------------------------------

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const running = answers.get(conversation.id);
  if (running) { running.stop(); return; }
  const content = text.value.trim();
  if (!content) return;
  store.setDraft(draftName(), "");
  text.value = "";
  fit(text);
  question(conversation.leaf, content);
});
text.addEventListener("input", () => {
  store.setDraft(draftName(), text.value);
  fit(text);
  send.disabled = !answers.has(conversation.id) && !text.value.trim();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answers.has(conversation.id)) byId("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    const running = answers.get(conversation.id);
    const shown = ["list", "swarm"].find((id) => narrow.matches && !byId(id).hidden);
    if (shown) panel(shown, false);
    else if (running) running.stop();
  }
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); fresh(); }
});

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
  if (id === "swarm") swarm.watch(shown);
  cover();
}

// On a narrow page a panel covers the conversation.
function cover() {
  document.querySelector("main").inert = narrow.matches && !(byId("list").hidden && byId("swarm").hidden);
}
narrow.addEventListener("change", cover);

for (const id of ["list", "swarm"]) {
  byId(`open-${id}`).addEventListener("click", () => {
    panel(id, byId(id).hidden);
    store.set({ panels: { list: !byId("list").hidden, swarm: !byId("swarm").hidden } });
  });
}
byId("open-settings").addEventListener("click", () => settings.open());

// --- models ---------------------------------------------------------------------------------------

const models = byId("model");
let lookedAt = 0;

async function loadModels() {
  lookedAt = performance.now();
  let names;
  try {
    names = (await (await call("/v1/models")).json()).data.map((model) => String(model.id));
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
    models.append(make("option", "", "no model yet"));
    models.options[0].value = "";
  }
  models.disabled = !names.length;
  if (names.includes(wanted)) models.value = wanted;
}

models.addEventListener("change", () => store.set({ model: models.value }));
swarm.addEventListener("told", (event) => {
  tellWaiting();
  const served = (swarm.told?.rings ?? []).map((ring) => ring.model).sort().join("\n");
  if (event.detail?.status === 401) keyDialog.open();
  if (served !== models.dataset.served || performance.now() - lookedAt > 9000) loadModels();
  models.dataset.served = served;
});

// --- several tabs, and the end --------------------------------------------------------------------

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

const panels = store.settings.panels ?? { list: false, swarm: false };
open(conversation);
panel("list", Boolean(panels.list) && !narrow.matches);
panel("swarm", Boolean(panels.swarm) && !narrow.matches);
loadModels();
setText(byId("said"), "");
