// The models that the swarm could serve, and the progress of those that it fetches.

import { arrange, byId, make, say, setSentence, setText, textButton } from "./dom.js";
import { call, lines } from "./endpoint.js";
import { bytes, count, fixed } from "./units.js";
import { t } from "./language.js";

// How many models are listed before "Show all".
const SHOWN = 8;
const STATES = {
  looking: t("Looking for {model}"), fetching: t("Fetching {model}"), hashing: t("Checking {model}"), asked: t("Loading {model}"),
};

// Models of this PC and of the catalog, with sizes, and how they would fit.
export class ModelShelf {
  // `start(model, kind)` serves a model, or pulls it.
  constructor(start) {
    this.start = start;
    this.answer = null;
    this.all = false;
    byId("model-search").addEventListener("input", () => this.#show());
    byId("more-models").addEventListener("click", () => { this.all = !this.all; this.#show(); });
  }

  // Load the list again when the PCs or the models change.
  update({ owner, pcs }) {
    byId("models").hidden = !owner;
    if (!owner) return;
    const state = JSON.stringify([pcs.map((one) => [one.pc, one.memory, one.doing]), owner.models]);
    if (state !== this.state) this.load();
    this.state = state;
  }

  async load() {
    try {
      this.answer = await (await call("/swarm/models")).json();
      const memory = bytes(this.answer.memory);
      setText(byId("models-place"), t("Fit and speed of one answer: on this swarm, {memory} of memory. Sizes are computed, speeds predicted.", { memory }));
      this.#show();
    } catch (error) {
      setSentence(byId("models-place"), error.message);
    }
  }

  #show() {
    if (!this.answer) return;
    const words = byId("model-search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
    const { local, catalog, offers } = this.answer;
    const first = (one) => (offers.includes(one.name) ? 0 : one.quantize !== null ? 1 : 2);
    const found = [
      ...local.filter((one) => one.source && matches(one.name)).map((one) => this.#localRow(one)),
      ...catalog.filter((one) => matches(`${one.name} ${one.use} ${one.license}`)).sort((a, b) => first(a) - first(b)).map((one) => this.#catalogRow(one)),
    ];
    const named = byId("model-search").value.trim();
    if (/^[\w.-]+\/[\w./-]+$/.test(named)) found.unshift(this.#row(named, t("of the Hugging Face hub"), named, true));
    const whole = this.all || words.length;
    byId("model-list").replaceChildren(...(whole ? found : found.slice(0, SHOWN)));
    if (!found.length) byId("model-list").append(make("li", "", t("No model of that name. Any model of the hub can be named OWNER/NAME.")));
    byId("more-models").hidden = words.length > 0 || found.length <= SHOWN;
    setText(byId("more-models"), this.all ? t("Show fewer") : t("Show all {count}", { count: found.length }));
  }

  #localRow(one) {
    return this.#row(one.name, `${t("on this PC")} · ${bytes(one.size)}`, one.source, false);
  }

  #catalogRow(one) {
    return this.#row(one.name, `${describe(one)} · ${one.use} · ${one.license}`, one.name, true, one.quantize !== null);
  }

  #row(name, about, source, fetched, fits = true) {
    const serve = textButton(t("Serve"), () => this.start(source, "serve"));
    serve.setAttribute("aria-label", t("Serve {name}", { name }));
    serve.disabled = !fits;
    const acts = make("div", "acts", serve);
    if (fetched) {
      const pull = textButton(t("Download"), () => this.start(source, "pull"));
      pull.setAttribute("aria-label", t("Download {name} to this PC", { name }));
      acts.append(pull);
    }
    return make("li", "item", make("div", "", make("strong", "", name), make("span", "small", about)), acts);
  }
}

// Parameters, size and expected speed of a model of the catalog.
export function describe(one) {
  const speed = one.tokens_per_s ? t("about {rate} tokens/s", { rate: fixed(one.tokens_per_s, one.tokens_per_s < 10 ? 1 : 0) }) : "";
  const fit = one.quantize === null ? t("does not fit") : one.quantize === "none" ? "" : t("fits with {quantize}", one);
  return [t("{count} parameters", { count: count(one.parameters) }), `${bytes(one.download)}`, fit || speed].filter(Boolean).join(" · ");
}

// Models that are fetched or loaded at the moment.
export class Jobs {
  constructor(place, changed) {
    this.place = place;
    this.changed = changed;
    this.jobs = new Map();
  }

  // Serve or pull a model and show its progress until it is done or dismissed.
  async run(model, kind) {
    const name = `${kind} ${model}`;
    if (this.jobs.get(name)?.running) return;
    const job = { running: true, abort: new AbortController() };
    job.text = make("span", "");
    job.bar = make("progress", "");
    job.bar.max = 1;
    job.bar.setAttribute("aria-label", kind === "pull" ? t("Download of {model}", { model }) : t("Progress of {model}", { model }));
    const close = textButton(t("Close"), () => { job.abort.abort(); this.#remove(name); });
    close.setAttribute("aria-label", t("Close the progress of {model}", { model }));
    job.element = make("div", "job", job.text, job.bar, close);
    this.jobs.set(name, job);
    this.#arrange();
    setText(job.text, `${t("Looking for {model}", { model })}…`);
    try {
      const [path, body] = kind === "pull" ? ["/api/pull", { model }] : ["/swarm/serve", { model }];
      for await (const line of lines(await call(path, { body, signal: job.abort.signal }))) this.#progress(job, model, line);
      setText(job.text, kind === "pull" ? t("{model} is on this PC.", { model }) : t("The swarm loads {model}: see its state above.", { model }));
      say(job.text.textContent);
    } catch (error) {
      if (error.name === "AbortError") return;
      job.element.classList.add("wrong");
      setText(job.text, `${model}: ${error.message}`);
      say(job.text.textContent);
    } finally {
      job.running = false;
      job.bar.hidden = true;
      this.changed();
    }
  }

  // Close those whose models are ready.
  settle(ready) {
    for (const [name, job] of this.jobs) if (!job.running && ready.includes(job.served)) this.#remove(name);
  }

  // A line of either route.
  #progress(job, model, line) {
    job.served = line.name || job.served;
    const done = line.done ?? line.completed ?? 0, total = line.total ?? 0;
    const word = (STATES[line.state] ?? STATES.fetching).replace("{model}", () => model);
    if (total) job.bar.value = done / total;
    else job.bar.removeAttribute("value");
    setText(job.text, word + (total ? `: ${t("{done} of {total}", { done: bytes(done), total: bytes(total) })}` : "…"));
  }

  #remove(name) {
    this.jobs.delete(name);
    this.#arrange();
  }

  #arrange() {
    arrange(this.place, [...this.jobs.values()].map((job) => job.element));
  }
}
