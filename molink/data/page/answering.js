// An answer that comes: asks the endpoint, and fills a message with what it says.

import { call, EndpointError, events } from "./endpoint.js";
import { messages, NOT_COMPLETE } from "./tree.js";

const NUMBERS = { temperature: Number, top_p: Number, max_tokens: Number, seed: Number };

// What of the settings is sent: only what was set.
export function sampling(settings) {
  const found = {};
  for (const [name, read] of Object.entries(NUMBERS)) {
    const text = String(settings[name] ?? "").trim();
    if (text !== "" && Number.isFinite(read(text))) found[name] = read(text);
  }
  return found;
}

export class Answering {
  // `changed()` is called for each piece, `ended(error)` at the end; error: null or an EndpointError.
  constructor(conversation, node, settings, changed, ended) {
    this.conversation = conversation;
    this.node = node;
    this.changed = changed;
    this.started = performance.now();
    this.first = 0;
    this.pieces = [];
    this.abort = new AbortController();
    // The page is being left, which ends the connection.
    this.left = false;
    this.over = this.#run(settings).then(ended);
  }

  stop() {
    this.abort.abort();
  }

  get elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  // Pieces per second over the last two seconds; 0 = not known.
  get pace() {
    const now = performance.now();
    while (this.pieces.length && this.pieces[0] < now - 2000) this.pieces.shift();
    const span = now - (this.pieces[0] ?? now);
    return this.pieces.length > 2 && span > 200 ? ((this.pieces.length - 1) * 1000) / span : 0;
  }

  async #run(settings) {
    const { node } = this;
    const facts = { tokens: 0, finish: "" };
    let problem = null;
    try {
      const body = {
        model: node.model || undefined,
        messages: messages(this.conversation, node.parent, settings.system),
        stream: true,
        stream_options: { include_usage: true },
        ...sampling(settings),
      };
      const response = await call("/v1/chat/completions", { body, signal: this.abort.signal });
      for await (const event of events(response)) this.#take(event, facts);
    } catch (error) {
      if (this.left) facts.finish = "left";
      else if (error.name === "AbortError") facts.finish = "stopped";
      else problem = error instanceof EndpointError ? error : new EndpointError(`The page failed: ${error.message}`);
    }
    node.note = this.#note(facts);
    node.problem = problem?.message ?? (node.content || node.thoughts || facts.finish === "stopped" || this.left ? "" : "The model had nothing to say.");
    return problem;
  }

  #take(event, facts) {
    if (event.usage) facts.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    facts.finish = choice.finish_reason || facts.finish;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (!content && !thought) return;
    const now = performance.now();
    this.first ||= now;
    this.last = now;
    this.pieces.push(now);
    if (thought) this.node.thoughts = (this.node.thoughts ?? "") + thought;
    if (content) this.node.content += content;
    this.changed();
  }

  #note({ tokens, finish }) {
    const facts = [];
    const seconds = (this.last - this.first) / 1000;
    if (this.first) facts.push(`first token after ${((this.first - this.started) / 1000).toFixed(2)} s`);
    if (tokens > 1 && seconds > 0) facts.push(`${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)} per second`);
    if (finish === "length") facts.push("cut at the length limit");
    if (finish === "stopped") facts.push("stopped");
    if (finish === "left") facts.push(NOT_COMPLETE);
    return facts.join(" · ");
  }
}
