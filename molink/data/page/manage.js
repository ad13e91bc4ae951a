// The view "Swarm": PCs with memory, layers, links and load, and what the owner may change.

import { arrange, byId, confirmed, make, say, setSentence, setText, textButton } from "./dom.js";
import { call } from "./endpoint.js";
import { duration, layersOf } from "./ring.js";
import { ago, bitRate, bytes } from "./units.js";
import { Jobs, ModelShelf } from "./models.js";
import { PcSettings } from "./pc_settings.js";
import { pcs, stateOf } from "./swarm.js";
import { t } from "./language.js";

const NOT_OWNER = t("To approve PCs or change models here, run `molink page` on this PC and open the address that it prints.");

export class Manage {
  // Calls `changed()` after an action of the owner.
  constructor(changed) {
    this.changed = changed;
    this.cards = new Map();
    this.asking = new Map();
    this.jobs = new Jobs(byId("jobs"), changed);
    this.settings = new PcSettings();
    this.shelf = new ModelShelf((model, kind) => this.start(model, kind));
    this.owner = null;
    this.served = [];
  }

  // `kind`: serve, or pull to download only.
  async start(model, kind) {
    const others = this.served.filter((one) => !one.stopped && one.name !== model).map((one) => one.name);
    const question = t("Serve {model} in place of {others}? Their answers end.", { model, others: others.join(", ") });
    if (kind === "serve" && others.length && !await confirmed(question, t("Serve"))) return;
    this.jobs.run(model, kind);
    byId("jobs").scrollIntoView({ block: "nearest" });
  }

  update(summary, failure) {
    setSentence(byId("manage-state"), failure ? failure.message : stateOf(summary));
    if (failure) return;
    this.owner = summary.owner;
    this.served = summary.owner?.models ?? [];
    setSentence(byId("owner-note"), summary.owner ? "" : NOT_OWNER);
    this.#showPcs(summary);
    this.#showWaiting(summary.owner?.pairings ?? []);
    this.#showServed(summary);
    this.jobs.settle(summary.rings.filter((ring) => ring.ready).map((ring) => ring.model));
    this.shelf.update(summary);
    this.settings.update(Boolean(summary.owner));
    this.#showEvents(summary.owner?.events ?? []);
    this.#showTransfers(summary.owner?.transfers ?? []);
  }

  // --- PCs ---

  #showPcs(summary) {
    const shown = new Map();
    for (const pc of summary.pcs) {
      const card = this.cards.get(pc.pc) ?? new PcCard((drained) => this.#act("/swarm/drain", { drained }, drained ? t("Draining this PC") : t("This PC takes layers again")));
      card.update(pc, summary);
      shown.set(pc.pc, card);
    }
    this.cards = shown;
    arrange(byId("pc-list"), [...shown.values()].map((card) => card.element));
  }

  #showWaiting(pairings) {
    const shown = new Map();
    for (const one of pairings) {
      const name = `${one.name} ${one.address} ${one.code}`;
      shown.set(name, this.asking.get(name) ?? this.#makeRequest(one));
    }
    this.asking = shown;
    byId("waiting").hidden = !shown.size;
    arrange(byId("waiting-list"), [...shown.values()]);
  }

  // The owner types the code, so that nobody approves without reading it on the other PC.
  #makeRequest({ name, address, code }) {
    const field = make("input", "");
    field.autocomplete = "off";
    field.inputMode = "numeric";
    const label = make("label", "field", `${t("Code that {name} shows", { name })} `, field);
    const wrong = make("p", "wrong");
    wrong.setAttribute("role", "alert");
    const form = make("form", "", label, make("div", "row",
      textButton(t("Refuse"), () => this.#act("/swarm/pairing", { code, approve: false }, t("Refused {name}", { name }), wrong)),
      make("button", "main", t("Approve"))), wrong);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const typed = field.value.trim();
      if (!typed) return field.focus();
      const digits = (text) => text.replace(/\D/g, "");
      if (digits(typed) !== digits(code)) {
        setText(wrong, t("That PC asked with another code. If its screen shows the one you typed, an attacker is in between: refuse it."));
        return field.select();
      }
      this.#act("/swarm/pairing", { code, approve: true }, t("Approved {name}", { name }), wrong);
    });
    return make("li", "card", make("h4", "", name), make("p", "small", address), form);
  }

  // --- models and events ---

  #showServed(summary) {
    const rows = (this.owner?.models ?? namesOf(summary.rings)).map((one) => this.#servedRow(one, summary));
    const text = rows.map((row) => row.text).join("\n");
    if (text === this.servedText) return;
    this.servedText = text;
    byId("served-list").replaceChildren(...rows.map((row) => row.make()));
    if (!rows.length) byId("served-list").append(make("li", "", t("No model is served.")));
  }

  #servedRow(one, summary) {
    const rings = summary.rings.filter((ring) => ring.model === one.name);
    const stages = rings.flatMap((ring) => ring.stages);
    const ready = rings.some((ring) => ring.ready);
    const reason = rings.map((ring) => ring.reason).find(Boolean);
    const state = one.stopped ? t("stopped") : ready ? t("ready") : reason || t("forming");
    const count = new Set(stages.map((stage) => stage.pc)).size;
    const facts = [state, count ? pcs(count) : "", one.quantize && one.quantize !== "none" ? one.quantize : ""];
    const about = facts.filter(Boolean).join(" · ");
    const owned = Boolean(this.owner);
    return {
      text: `${one.name} ${about} ${owned}`,
      make: () => {
        const act = one.stopped
          ? textButton(t("Serve"), () => this.jobs.run(one.name, "serve"))
          : textButton(t("Unload"), async () => {
            if (await confirmed(t("Unload {name} on all PCs of the swarm?", one), t("Unload"))) this.#act("/swarm/stop", { model: one.name }, t("Unloading {name}", one));
          });
        act.setAttribute("aria-label", `${act.textContent} ${one.name}`);
        return make("li", "item", make("div", "", make("strong", "", one.name), make("span", "small", about)), ...(owned ? [act] : []));
      },
    };
  }

  #showEvents(events) {
    byId("events-box").hidden = !events.length;
    const texts = events.toReversed().map(({ age_s: age, text }) => `${age === null ? "" : `${ago(age)}: `}${text}`);
    setLines(byId("event-list"), texts);
  }

  #showTransfers(transfers) {
    setLines(byId("transfer-list"), transfers.map(({ pc, model, done, total, rate }) =>
      t("{pc} fetches {model}: {done} of {total}", { pc, model, done: bytes(done), total: bytes(total) }) + (rate ? `, ${bytes(rate)}/s` : "")));
  }

  // Tell the endpoint to do something; an error is shown in `place`.
  async #act(path, body, done, place = byId("owner-note")) {
    try {
      await call(path, { body });
      say(done);
      this.changed();
    } catch (error) {
      setSentence(place, error.message);
    }
  }
}

function namesOf(rings) {
  return [...new Set(rings.map((ring) => ring.model))].map((name) => ({ name, stopped: false, quantize: "none" }));
}

class PcCard {
  constructor(drain) {
    this.name = make("h4", "");
    this.device = make("p", "small");
    this.bar = make("div", "bar", make("span", "weights"), make("span", "kv"));
    this.memory = make("p", "small");
    this.stages = make("ul", "plain-list");
    this.drained = false;
    this.button = textButton("", () => drain(!this.drained));
    this.element = make("li", "card", this.name, this.device, this.bar, this.memory, this.stages, this.button);
  }

  update(pc, { rings, owner }) {
    const mine = owner?.pc === pc.pc;
    setText(this.name, mine ? t("{pc} (this PC)", pc) : pc.pc);
    setText(this.device, [pc.device, t(pc.doing)].filter(Boolean).join(" · "));
    const used = pc.weights + pc.kv;
    this.bar.hidden = !pc.memory;
    const [weights, kv] = this.bar.children;
    weights.style.width = share(pc.weights, pc.memory);
    kv.style.width = share(pc.kv, pc.memory);
    const [inWeights, inKv, memory] = [pc.weights, pc.kv, pc.memory].map(bytes);
    const shown = used ? t("{inWeights} of weights and {inKv} for conversations, of {memory}", { inWeights, inKv, memory }) : t("{memory} of memory", { memory });
    setText(this.memory, pc.memory ? shown : "");
    this.#showStages(rings.flatMap((ring) => ring.stages.map((stage, at) => ({ ring, stage, at }))).filter(({ stage }) => stage.pc === pc.pc));
    this.drained = Boolean(mine && owner.drained);
    this.button.hidden = !mine;
    setText(this.button, this.drained ? t("Hold layers again") : t("Drain: move its layers away"));
  }

  #showStages(held) {
    const lines = held.map(({ ring, stage, at }) => {
      const facts = [`${ring.model}: ${layersOf(stage)}`];
      if (stage.doing) facts.push(t(stage.doing));
      else if (stage.busy !== null) facts.push(t("busy {share} %", { share: stage.busy }));
      if (ring.stages.length > 1 && stage.link_s) {
        const to = ring.stages[(at + 1) % ring.stages.length].pc;
        const link = duration(stage.link_s) + (stage.link_rate ? `, ${bitRate(stage.link_rate)}` : "");
        facts.push(t("{link} to {pc}", { link, pc: to }));
      }
      return facts.join(" · ");
    });
    setLines(this.stages, lines);
  }
}

// Make `lines` the items of a list; items that stay keep their place.
function setLines(list, lines) {
  while (list.children.length < lines.length) list.append(make("li", ""));
  while (list.children.length > lines.length) list.lastChild.remove();
  lines.forEach((line, at) => setText(list.children[at], line));
}

function share(part, whole) {
  return `${whole ? Math.min(100, (100 * part) / whole) : 0}%`;
}
