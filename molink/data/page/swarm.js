// Polls the swarm summary, draws the panel, and explains why an answer waits.

import { arrange, byId, copyButton, make, setSentence, setText } from "./dom.js";
import { call } from "./endpoint.js";
import { Ring } from "./ring.js";
import { t } from "./language.js";

// Poll interval in seconds while the panel is open or an answer is pending, and otherwise.
const ACTIVE_S = 1, IDLE_S = 10;
// How much the reported age of a request may differ from the time since it was sent, in seconds.
const AGE_TOLERANCE_S = 3;

export class Swarm extends EventTarget {
  constructor() {
    super();
    this.summary = null;
    this.watchers = new Set();
    this.waiting = 0;
    this.rings = [];
    this.others = byId("others");
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    this.#schedule(0);
  }

  // Poll often while `who`, the panel or the view, is open.
  watch(who, open) {
    if (open) this.watchers.add(who);
    else this.watchers.delete(who);
    this.#schedule(0);
  }

  expect(count) {
    if (count > this.waiting) this.#schedule(0.2);
    this.waiting = count;
  }

  refresh() {
    this.#schedule(0);
  }

  #schedule(seconds) {
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.#poll(), seconds * 1000);
  }

  async #poll() {
    let failure = null;
    try {
      this.summary = await (await call("/swarm")).json();
    } catch (error) {
      failure = error;
    }
    this.#schedule(this.watchers.size || this.waiting ? ACTIVE_S : IDLE_S);
    this.#show(failure);
    this.dispatchEvent(new CustomEvent("refreshed", { detail: failure }));
  }

  #show(failure) {
    const pill = byId("open-swarm");
    pill.classList.toggle("ready", !failure && Boolean(this.summary?.ready));
    pill.classList.toggle("bad", Boolean(failure) || !this.summary?.ready);
    const word = failure ? t("Swarm") : pcs(this.summary.online);
    setText(byId("swarm-word"), word);
    pill.setAttribute("aria-label", `${t("Swarm")}: ${failure ? t("unknown") : `${word}, ${this.summary.ready ? t("ready") : t("not ready")}`}`);
    setSentence(byId("swarm-state"), failure ? failure.message : stateOf(this.summary));
    if (failure || !this.watchers.has("panel")) return this.rings.forEach((ring) => ring.stop());
    const { rings, pcs: all, join, pairings, owner } = this.summary;
    while (this.rings.length < rings.length) this.rings.push(new Ring());
    for (const ring of this.rings.splice(rings.length)) ring.stop();
    arrange(byId("rings"), this.rings.map((ring) => ring.element));
    rings.forEach((ring, at) => this.rings[at].update(ring));
    this.#list(all.filter((one) => !one.is_placed));
    this.#showJoin(join);
    const how = owner ? t("see Manage.") : t("run `molink approve` in a terminal.");
    setSentence(byId("pairings"), pairings ? t("{pcs} waiting to join: {how}", { pcs: pcs(pairings), how }) : "");
  }

  #list(others) {
    const lines = others.map((one) => [one.pc, one.device, t(one.doing)].filter(Boolean).join(" · "));
    if (lines.join("\n") === this.listed) return;
    this.listed = lines.join("\n");
    this.others.replaceChildren();
    if (!lines.length) return;
    this.others.append(make("h3", "", t("Other PCs")), make("ul", "stages", ...lines.map((line) => make("li", "", line))));
  }

  #showJoin(commands) {
    if (commands.join("\n") === this.commands) return;
    this.commands = commands.join("\n");
    byId("join-commands").replaceChildren(...commands.map((command, at) => make("div", "command",
      make("span", "small", at ? t("or, if it does not find the swarm:") : ""),
      make("code", "", command), copyButton(t("Copy {command}", { command }), () => command))));
  }
}

export function pcs(count) {
  return count === 1 ? t("1 PC") : t("{count} PCs", { count });
}

export function stateOf(summary) {
  const { ready, trouble, offline } = summary;
  const state = ready ? t("ready") : t("not ready") + (trouble ? `: ${trouble}` : "");
  const values = { pcs: pcs(summary.online), offline, state };
  return offline ? t("{pcs} connected, {offline} offline, {state}.", values) : t("{pcs} connected, {state}.", values);
}

// Explain why a request sent `elapsed` seconds ago has no token yet.
export function whyWaiting(summary, model, elapsed) {
  const rings = (summary?.rings ?? []).filter((ring) => ring.model === model);
  if (!summary) return t("Waiting for the swarm…");
  if (!rings.some((ring) => ring.ready)) {
    const reason = rings.map((ring) => ring.reason).find(Boolean) || summary.trouble;
    return `${t("The swarm is not ready")}${reason ? `: ${reason}` : ""}. ${t("The request is queued…")}`;
  }
  const requests = rings.flatMap((ring) => ring.requests);
  // The summary has no request ids: match by age.
  const mine = requests.filter((one) => one.state !== "decode" && Math.abs(one.age_s - elapsed) < AGE_TOLERANCE_S)
    .sort((a, b) => Math.abs(a.age_s - elapsed) - Math.abs(b.age_s - elapsed))[0];
  if (mine?.state === "prefill") {
    const share = mine.prompt ? Math.min(99, Math.round((100 * mine.computed) / mine.prompt)) : 0;
    return t("Processing {prompt} prompt tokens: {share} %…", { prompt: mine.prompt, share });
  }
  if (mine?.state === "waiting") {
    const before = requests.filter((one) => one.state === "waiting" && one.age_s > mine.age_s).length;
    const run = rings.reduce((sum, ring) => sum + ring.running, 0);
    return t("Queued: {run} running, {before} ahead of this request…", { run, before });
  }
  return t("Waiting for the first token…");
}
