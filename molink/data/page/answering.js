// Requests an answer from the endpoint and streams it into a message.

import { call, EndpointError, events } from "./endpoint.js";
import { messages, NOT_COMPLETE, path } from "./tree.js";
import { t } from "./language.js";
import { fixed } from "./units.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
];
// What is asked of the model to continue an answer that was cut.
const CONTINUE = "Continue exactly where your answer stops. Do not repeat or introduce anything.";

// The sampling parameters to send; fields left empty are omitted.
export function sampling(settings) {
  const found = {};
  for (const name of NUMBERS) {
    const text = String(settings[name] ?? "").trim();
    if (text !== "" && Number.isFinite(Number(text))) found[name] = Number(text);
  }
  const stops = String(settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) found.stop = stops;
  if (settings.thinking) found.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return found;
}

// How long the first token of an answer took.
export function firstToken({ first, started }) {
  return t("first token in {seconds} s", { seconds: fixed((first - started) / 1000, 2) });
}

export class Answering {
  // Calls `changed()` after each event and `ended(error)` at the end; error is null or an EndpointError.
  // A message that has text already is continued.
  constructor(conversation, node, store, changed, ended) {
    this.conversation = conversation;
    this.store = store;
    this.continues = Boolean(node.content);
    this.node = node;
    this.changed = changed;
    this.started = performance.now();
    this.first = 0;
    this.pieces = [];
    this.abort = new AbortController();
    // Set when the page unloads, which closes the connection.
    this.left = false;
    this.over = this.#run(store.settingsOf(conversation)).then(ended);
  }

  stop() {
    this.abort.abort();
  }

  get elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  // Events per second over the last two seconds; 0 if unknown.
  get rate() {
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
        messages: await this.#messages(settings.system),
        stream: true,
        stream_options: { include_usage: true },
        ...sampling(settings),
      };
      const response = await call("/v1/chat/completions", { body, signal: this.abort.signal });
      for await (const event of events(response)) this.#take(event, facts);
    } catch (error) {
      if (this.left) facts.finish = "left";
      else if (error.name === "AbortError") facts.finish = "stopped";
      else problem = error instanceof EndpointError ? error : new EndpointError(t("Error in this page: {message}", error));
    }
    node.note = this.#note(facts);
    node.cut = facts.finish !== "stop" && Boolean(node.content);
    if (facts.context) node.context = facts.context;
    node.problem = problem?.message ?? (node.content || node.thoughts || facts.finish === "stopped" || this.left ? "" : t("The model returned an empty answer."));
    return problem;
  }

  async #messages(system) {
    const { conversation, node, continues } = this;
    const leaf = continues ? node.id : node.parent;
    const urls = await this.store.imageUrls(path({ ...conversation, leaf }));
    const found = messages(conversation, leaf, system, urls);
    return continues ? [...found, { role: "user", content: CONTINUE }] : found;
  }

  #take(event, facts) {
    if (event.usage) {
      facts.tokens = event.usage.completion_tokens;
      facts.context = event.usage.total_tokens;
    }
    const choice = event.choices?.[0];
    if (!choice) return;
    facts.finish = choice.finish_reason || facts.finish;
    const { content, reasoning_content: reasoning } = choice.delta ?? {};
    if (!content && !reasoning) return;
    const now = performance.now();
    this.first ||= now;
    this.last = now;
    this.pieces.push(now);
    if (reasoning) this.node.thoughts = (this.node.thoughts ?? "") + reasoning;
    if (content) this.node.content += content;
    this.changed();
  }

  #note({ tokens, finish }) {
    const facts = [];
    const seconds = (this.last - this.first) / 1000;
    if (this.first) facts.push(firstToken(this));
    if (tokens > 1 && seconds > 0) facts.push(t("{tokens} tokens, {rate} tokens/s", { tokens, rate: fixed((tokens - 1) / seconds, 1) }));
    if (finish === "length") facts.push(t("stopped at the length limit"));
    if (finish === "stopped") facts.push(t("stopped"));
    if (finish === "left") facts.push(t(NOT_COMPLETE));
    return facts.join(" · ");
  }
}
