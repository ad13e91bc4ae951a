// What the swarm does: asked now and then, drawn in the panel, and told to whoever waits.

import { arrange, byId, copyButton, make, setText } from "./dom.js";
import { call } from "./endpoint.js";
import { Ring } from "./ring.js";

// Seconds between two looks while somebody looks or waits, and otherwise.
const OFTEN_S = 1, SELDOM_S = 10;
// How old what is told may be, and how much earlier a request is sent than it is there.
const LATE_S = 3;

export class Swarm extends EventTarget {
  constructor() {
    super();
    this.told = null;
    this.watched = false;
    this.waiting = 0;
    this.rings = [];
    this.others = byId("others");
    document.addEventListener("visibilitychange", () => this.#soon(0));
    this.#soon(0);
  }

  // Look often while the panel is open, or an answer is waited for.
  watch(open) {
    this.watched = open;
    this.#soon(0);
  }

  expect(count) {
    if (count > this.waiting) this.#soon(0.2);
    this.waiting = count;
  }

  look() {
    this.#soon(0);
  }

  #soon(seconds) {
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.#look(), seconds * 1000);
  }

  async #look() {
    let failure = null;
    try {
      this.told = await (await call("/swarm")).json();
    } catch (error) {
      failure = error;
    }
    this.#soon(this.watched || this.waiting ? OFTEN_S : SELDOM_S);
    this.#show(failure);
    this.dispatchEvent(new CustomEvent("told", { detail: failure }));
  }

  #show(failure) {
    const pill = byId("open-swarm");
    pill.classList.toggle("ready", !failure && Boolean(this.told?.ready));
    pill.classList.toggle("bad", Boolean(failure) || !this.told?.ready);
    const word = failure ? "Swarm" : pcs(this.told.here);
    setText(byId("swarm-word"), word);
    pill.setAttribute("aria-label", `Swarm: ${failure ? "unknown" : `${word}, ${this.told.ready ? "ready" : "not ready"}`}`);
    setText(byId("swarm-state"), failure ? failure.message : stateOf(this.told));
    if (failure || !this.watched) return this.rings.forEach((ring) => ring.stop());
    const { rings, others, join, knocks } = this.told;
    while (this.rings.length < rings.length) this.rings.push(new Ring());
    for (const ring of this.rings.splice(rings.length)) ring.stop();
    arrange(byId("rings"), this.rings.map((ring) => ring.element));
    rings.forEach((ring, at) => this.rings[at].update(ring));
    this.#list(others);
    this.#joining(join);
    setText(byId("knocks"), knocks ? `${pcs(knocks)} asked to be let in: run molink approve in a terminal.` : "");
  }

  #list(others) {
    const lines = others.map((one) => [one.pc, one.device, one.doing].filter(Boolean).join(" · "));
    if (lines.join("\n") === this.listed) return;
    this.listed = lines.join("\n");
    this.others.replaceChildren();
    if (!lines.length) return;
    this.others.append(make("h3", "", "Other PCs"), make("ul", "stages", ...lines.map((line) => make("li", "", line))));
  }

  #joining(commands) {
    if (commands.join("\n") === this.commands) return;
    this.commands = commands.join("\n");
    byId("join-commands").replaceChildren(...commands.map((command, at) => make("div", "command",
      make("span", "small", at ? "or, if it does not find the swarm:" : ""),
      make("code", "", command), copyButton(`Copy ${command}`, () => command))));
  }
}

function pcs(count) {
  return count === 1 ? "1 PC" : `${count} PCs`;
}

function stateOf(told) {
  const away = told.away ? `, ${told.away} away` : "";
  const state = told.ready ? "ready" : `not ready${told.trouble ? `: ${told.trouble}` : ""}`;
  return `${pcs(told.here)} here${away}, ${state}.`;
}

// Why a request that was sent `elapsed` seconds ago has no answer yet, as far as it is known.
export function whyWaiting(told, model, elapsed) {
  const rings = (told?.rings ?? []).filter((ring) => ring.model === model);
  if (!told) return "Waiting for the swarm…";
  if (!rings.some((ring) => ring.ready)) {
    const reason = rings.map((ring) => ring.reason).find(Boolean) || told.trouble;
    return `The swarm is not ready${reason ? `: ${reason}` : ""}. The request waits for it…`;
  }
  const requests = rings.flatMap((ring) => ring.requests);
  // Requests have no names here: it is the one that came when this was sent.
  const mine = requests.filter((one) => one.state !== "decode" && Math.abs(one.age_s - elapsed) < LATE_S)
    .sort((a, b) => Math.abs(a.age_s - elapsed) - Math.abs(b.age_s - elapsed))[0];
  if (mine?.state === "prefill") {
    const share = mine.prompt ? Math.min(99, Math.round((100 * mine.computed) / mine.prompt)) : 0;
    return `The PCs read the ${mine.prompt} tokens of the conversation: ${share} %…`;
  }
  if (mine?.state === "waiting") {
    const before = requests.filter((one) => one.state === "waiting" && one.age_s > mine.age_s).length;
    const run = rings.reduce((sum, ring) => sum + ring.running, 0);
    return `Waiting for a place: ${run} answers run, ${before} ${before === 1 ? "waits" : "wait"} before this one…`;
  }
  return "Waiting for the first token…";
}
