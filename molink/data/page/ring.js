// One ring, drawn: a place for each stage, how busy it is, and a token on its way round.
//
// Where a token is between two looks nobody tells. What is known is how long each stage and each link
// takes; the dot keeps these shares, slowed down so that one can follow it, and the page says by how much.

import { make, setText, svg } from "./dom.js";

const SIZE = 300, MIDDLE = SIZE / 2, RADIUS = 92, PLACE = 21;
// Seconds that the dot takes at least for a round.
const ROUND_S = 3;

const still = window.matchMedia("(prefers-reduced-motion: reduce)");

export class Ring {
  constructor() {
    this.drawing = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "ring", "aria-hidden": "true" });
    this.pace = make("p", "small");
    this.stages = make("ol", "stages");
    this.title = make("h3", "");
    this.state = make("p", "small");
    this.element = make("section", "ring-box", this.title, this.drawing, this.state, this.pace, this.stages);
    this.shape = "";
    this.moving = false;
  }

  update(ring) {
    this.ring = ring;
    setText(this.title, ring.model);
    setText(this.state, stateOf(ring));
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
    this.places = ring.stages.map((stage, at) => {
      const [x, y] = point(at / count);
      const busy = svg("circle", { cx: x, cy: y, r: PLACE, class: "busy", pathLength: 100, transform: `rotate(-90 ${x} ${y})` });
      const label = count <= 6 ? named(stage, at / count) : [];
      const group = svg("g", { class: "place" },
        svg("circle", { cx: x, cy: y, r: PLACE, class: "stage" }), busy,
        svg("text", { x, y: y + 5, class: "number" }, String(at + 1)), ...label);
      return { group, busy };
    });
    this.dot = svg("circle", { r: 6, class: "token" });
    this.rate = svg("text", { x: MIDDLE, y: MIDDLE + 2, class: "rate" });
    this.unit = svg("text", { x: MIDDLE, y: MIDDLE + 20, class: "unit" });
    const lowest = Math.max(MIDDLE + RADIUS + 8, ...ring.stages.map((_, at) => point(at / count)[1] + PLACE + 42));
    this.drawing.setAttribute("viewBox", `0 0 ${SIZE} ${count ? lowest : 1}`);
    this.drawing.replaceChildren(
      svg("circle", { cx: MIDDLE, cy: MIDDLE, r: RADIUS, class: "track" }),
      ...this.places.map((place) => place.group), this.dot, this.rate, this.unit);
    this.rows = ring.stages.map(() => make("li", ""));
    this.stages.replaceChildren(...this.rows);
  }

  #mark(stage, at) {
    const { group, busy } = this.places[at];
    busy.setAttribute("stroke-dasharray", `${Math.min(100, stage.busy ?? 0)} 100`);
    group.classList.toggle("absent", Boolean(stage.doing));
    setText(this.rows[at], describe(stage, this.ring.stages.length > 1));
    if (at === 0) {
      const rate = this.ring.tokens_per_s;
      setText(this.rate, rate ? rate.toFixed(1) : "");
      setText(this.unit, rate ? "tokens/s" : !this.ring.ready ? "not ready" : this.ring.running ? "at work" : "idle");
    }
  }

  #move(moving) {
    const round = roundOf(this.ring);
    const slower = Math.max(1, ROUND_S / round);
    const times = slower >= 10 ? Math.round(slower) : slower.toFixed(1);
    const shown = moving && !still.matches;
    const slow = slower > 1.05 ? `, drawn ${times} times slower` : "";
    setText(this.pace, round > 1e-6 ? `A round takes about ${duration(round)}${shown ? slow : ""}.` : "");
    this.dot?.toggleAttribute("hidden", !shown);
    if (shown === this.moving) return;
    this.moving = shown;
    if (shown) requestAnimationFrame((now) => this.#step(now));
    else this.places?.forEach((place) => place.group.classList.remove("now"));
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
    this.places.forEach((place, number) => place.group.classList.toggle("now", number === at && along === 0));
    requestAnimationFrame((next) => this.#step(next));
  }
}

// On the ring; `part` of a round from the top, clockwise.
function point(part, radius = RADIUS) {
  const angle = part * 2 * Math.PI - Math.PI / 2;
  return [MIDDLE + radius * Math.cos(angle), MIDDLE + radius * Math.sin(angle)];
}

// Name and layers of a stage, above or below its place, inside of the drawing.
function named(stage, part) {
  const [x, y] = point(part);
  const above = y < MIDDLE - 1;
  const name = stage.pc.length > 16 ? stage.pc.slice(0, 15) + "…" : stage.pc;
  const room = Math.max(name.length, 12) * 3.6;
  const at = Math.min(Math.max(x, room), SIZE - room);
  const line = (text, down, kind) => svg("text", { x: at, y: y + (above ? -PLACE - 25 : PLACE + 18) + down, class: kind }, text);
  return [line(name, 0, "name"), line(layersOf(stage), 15, "unit")];
}

export function roundOf(ring) {
  const sum = (ring?.stages ?? []).reduce((all, stage) => all + stage.decode_s + stage.link_s, 0);
  return Math.max(sum, 1e-6);
}

// At which stage the dot is at that time, and how far on its way to the next one (0: it is computed).
export function whereIs(ring, seconds) {
  const round = roundOf(ring);
  let left = (((seconds / Math.max(round, ROUND_S)) % 1) + 1) % 1 * round;
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
  if (!ring.ready) return `Not ready: ${ring.reason || "it is being formed"}.`;
  const run = ring.running === 1 ? "1 answer runs" : `${ring.running || "No"} answers run`;
  const wait = ring.waiting ? `, ${ring.waiting} ${ring.waiting === 1 ? "waits" : "wait"}` : "";
  return `${run}${wait}.${ring.reason ? ` ${ring.reason}.` : ""}`;
}

function describe(stage, several) {
  const parts = [stage.pc, layersOf(stage), stage.device];
  if (stage.doing) parts.push(stage.doing);
  else if (stage.busy !== null) parts.push(`busy ${stage.busy} %`);
  if (several && stage.link_s) parts.push(`${duration(stage.link_s)} to the next`);
  return parts.filter(Boolean).join(" · ");
}

// Counted from 1.
function layersOf({ layers: [first, last] }) {
  return last - first === 1 ? `layer ${last}` : `layers ${first + 1} to ${last}`;
}

export function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return seconds >= 0.01 ? `${Math.round(seconds * 1000)} ms` : `${(seconds * 1000).toFixed(1)} ms`;
}
