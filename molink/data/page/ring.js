// Draws one ring: a circle per stage, its load, and a token that travels around.
//
// Token positions are not reported. The dot is animated from the measured time of each stage and link,
// slowed down enough to follow; the caption names the factor.

import { make, setSentence, setText, svg } from "./dom.js";
import { t } from "./language.js";
import { fixed } from "./units.js";

const SIZE = 300, MIDDLE = SIZE / 2, RADIUS = 92, STAGE_RADIUS = 21;
// Minimum seconds per animated pass.
const MIN_PASS_S = 3;

const still = window.matchMedia("(prefers-reduced-motion: reduce)");

export class Ring {
  constructor() {
    this.drawing = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "ring", "aria-hidden": "true" });
    this.timing = make("p", "small");
    this.stages = make("ol", "stages");
    this.title = make("h3", "");
    this.state = make("p", "small");
    this.element = make("section", "ring-box", this.title, this.drawing, this.state, this.timing, this.stages);
    this.shape = "";
    this.moving = false;
  }

  update(ring) {
    this.ring = ring;
    setText(this.title, ring.model);
    setSentence(this.state, stateOf(ring));
    const shape = JSON.stringify(ring.stages.map((stage) => [stage.pc, stage.layers]));
    if (shape !== this.shape) this.#draw(ring);
    this.shape = shape;
    ring.stages.forEach((stage, at) => this.#mark(stage, at));
    this.drawing.toggleAttribute("hidden", !ring.stages.length);
    this.#move(ring.running > 0 && ring.stages.length > 0);
  }

  stop() {
    this.#move(false);
  }

  #draw(ring) {
    const count = ring.stages.length;
    this.circles = ring.stages.map((stage, at) => {
      const [x, y] = point(at / count);
      const busy = svg("circle", { cx: x, cy: y, r: STAGE_RADIUS, class: "busy", pathLength: 100, transform: `rotate(-90 ${x} ${y})` });
      const label = count <= 6 ? named(stage, at / count) : [];
      const group = svg("g", { class: "stage-group" },
        svg("circle", { cx: x, cy: y, r: STAGE_RADIUS, class: "stage" }), busy,
        svg("text", { x, y: y + 5, class: "number" }, String(at + 1)), ...label);
      return { group, busy };
    });
    this.dot = svg("circle", { r: 6, class: "token" });
    this.rate = svg("text", { x: MIDDLE, y: MIDDLE + 2, class: "rate" });
    this.unit = svg("text", { x: MIDDLE, y: MIDDLE + 20, class: "unit" });
    const lowest = Math.max(MIDDLE + RADIUS + 8, ...ring.stages.map((_, at) => point(at / count)[1] + STAGE_RADIUS + 42));
    this.drawing.setAttribute("viewBox", `0 0 ${SIZE} ${count ? lowest : 1}`);
    this.drawing.replaceChildren(
      svg("circle", { cx: MIDDLE, cy: MIDDLE, r: RADIUS, class: "track" }),
      ...this.circles.map((circle) => circle.group), this.dot, this.rate, this.unit);
    this.rows = ring.stages.map(() => make("li", ""));
    this.stages.replaceChildren(...this.rows);
  }

  #mark(stage, at) {
    const { group, busy } = this.circles[at];
    // The share is of the last seconds: beside "Idle" it would say the opposite.
    const share = this.ring.running ? stage.busy : null;
    busy.setAttribute("stroke-dasharray", `${Math.min(100, share ?? 0)} 100`);
    group.classList.toggle("absent", Boolean(stage.doing));
    setText(this.rows[at], describe(stage, share, this.ring.stages.length > 1));
    if (at === 0) {
      const rate = this.ring.tokens_per_s;
      setText(this.rate, rate ? fixed(rate, 1) : "");
      setText(this.unit, rate ? t("tokens/s") : !this.ring.ready ? t("not ready") : this.ring.running ? t("busy") : t("idle"));
    }
  }

  #move(moving) {
    const round = roundOf(this.ring);
    const slower = Math.max(1, MIN_PASS_S / round);
    const times = fixed(slower, slower >= 10 ? 0 : 1);
    const shown = moving && !still.matches;
    const slow = shown && slower > 1.05 ? ` ${t("(animation slowed {times}×)", { times })}` : "";
    setText(this.timing, round > 1e-6 ? t("One pass takes about {time}{slow}.", { time: duration(round), slow }) : "");
    this.dot?.toggleAttribute("hidden", !shown);
    if (shown === this.moving) return;
    this.moving = shown;
    if (shown) requestAnimationFrame((now) => this.#step(now));
    else this.circles?.forEach((circle) => circle.group.classList.remove("now"));
  }

  #step(now) {
    if (!this.moving || !this.element.isConnected) {
      this.moving = false;
      return;
    }
    const { at, along } = whereIs(this.ring, now / 1000);
    const [x, y] = point((at + along) / this.ring.stages.length);
    this.dot.setAttribute("cx", x);
    this.dot.setAttribute("cy", y);
    this.circles.forEach((circle, number) => circle.group.classList.toggle("now", number === at && along === 0));
    requestAnimationFrame((next) => this.#step(next));
  }
}

// The point at `part` of a full turn, clockwise from the top.
function point(part, radius = RADIUS) {
  const angle = part * 2 * Math.PI - Math.PI / 2;
  return [MIDDLE + radius * Math.cos(angle), MIDDLE + radius * Math.sin(angle)];
}

// Labels of a stage, above or below its circle and inside the drawing.
function named(stage, part) {
  const [x, y] = point(part);
  const above = y < MIDDLE - 1;
  const name = stage.pc.length > 16 ? stage.pc.slice(0, 15) + "…" : stage.pc;
  const room = Math.max(name.length, 12) * 3.6;
  const at = Math.min(Math.max(x, room), SIZE - room);
  const line = (text, down, kind) => svg("text", { x: at, y: y + (above ? -STAGE_RADIUS - 25 : STAGE_RADIUS + 18) + down, class: kind }, text);
  return [line(name, 0, "name"), line(layersOf(stage), 15, "unit")];
}

export function roundOf(ring) {
  const sum = (ring?.stages ?? []).reduce((all, stage) => all + stage.decode_s + stage.link_s, 0);
  return Math.max(sum, 1e-6);
}

// The stage at which the dot is at that time, and its progress to the next stage (0: computing).
export function whereIs(ring, seconds) {
  const round = roundOf(ring);
  let left = (((seconds / Math.max(round, MIN_PASS_S)) % 1) + 1) % 1 * round;
  for (let at = 0; at < ring.stages.length; at++) {
    const { decode_s, link_s } = ring.stages[at];
    if (left < decode_s) return { at, along: 0 };
    left -= decode_s;
    if (left < link_s) return { at, along: left / link_s };
    left -= link_s;
  }
  return { at: 0, along: 0 };
}

function stateOf(ring) {
  if (!ring.ready) return t("Not ready: {reason}.", { reason: ring.reason || t("the pipeline is forming") });
  const { running, waiting } = ring;
  const run = running ? t("{running} running", { running }) : t("Idle");
  const wait = waiting ? `, ${t("{waiting} waiting", { waiting })}` : "";
  return `${run}${wait}.${ring.reason ? ` ${ring.reason}.` : ""}`;
}

function describe(stage, share, several) {
  const parts = [stage.pc, layersOf(stage), stage.device];
  if (stage.doing) parts.push(t(stage.doing));
  else if (share !== null) parts.push(t("busy {share} %", { share }));
  if (several && stage.link_s) parts.push(t("{time} to next stage", { time: duration(stage.link_s) }));
  return parts.filter(Boolean).join(" · ");
}

// Layers are counted from 1 here.
export function layersOf({ layers: [first, last] }) {
  return last - first === 1 ? t("layer {last}", { last }) : t("layers {first}–{last}", { first: first + 1, last });
}

export function duration(seconds) {
  if (seconds >= 1) return `${fixed(seconds, 1)} s`;
  return seconds >= 0.01 ? `${Math.round(seconds * 1000)} ms` : `${fixed(seconds * 1000, 1)} ms`;
}
