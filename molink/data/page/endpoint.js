// The endpoint client: requests, event streams, and readable errors.

import { t } from "./language.js";

const KEY = "molink.key", OWNER = "molink.owner";

export class EndpointError extends Error {
  constructor(message, status = 0, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

let key = recall(KEY), owner = recall(OWNER);

export const apiKey = () => key;

function setApiKey(text) {
  key = text.trim();
  keep(KEY, key);
}

// Take the owner's token out of an address that `molink page` printed; returns whether it was one.
export function takeOwnerToken() {
  const found = /^#owner=([\w-]{20,100})$/.exec(location.hash);
  if (!found) return false;
  owner = found[1];
  keep(OWNER, owner);
  history.replaceState(null, "", location.pathname);
  return true;
}

// Secrets stay until the tab closes; where storage is blocked, in memory only.
function keep(name, text) {
  try { sessionStorage.setItem(name, text); } catch { /* storage is blocked */ }
}

function recall(name) {
  try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; }
}

// Use `text` as the key from now on, unless the endpoint refuses it; returns false then.
export async function tryApiKey(text) {
  const before = key;
  setApiKey(text);
  try {
    await call("/v1/models");
  } catch (error) {
    if (error.status !== 401) return true;
    setApiKey(before);
    return false;
  }
  return true;
}

// Send a request and return its successful response; throws EndpointError.
export async function call(path, { body, signal } = {}) {
  try {
    return await send(path, owner || key, body, signal);
  } catch (error) {
    if (error.status !== 401 || !owner) throw error;
    // A token of an earlier start.
    owner = "";
    keep(OWNER, "");
    return send(path, key, body, signal);
  }
}

async function send(path, secret, body, signal) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (secret) headers.Authorization = "Bearer " + encodeKey(secret);
  const options = { headers, signal, cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new EndpointError(t("The endpoint does not respond. Is molink running on that PC?"));
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

// Headers take Latin-1 only; the endpoint decodes them as UTF-8.
function encodeKey(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function refusal(response) {
  let told = "";
  try {
    const { error } = await response.json();
    told = String(error.message ?? error ?? "");
  } catch { /* not an error object of ours, perhaps from a proxy */ }
  const after = Number(response.headers.get("Retry-After")) || 0;
  return new EndpointError(sentence(response.status, told, after), response.status, after);
}

const PREFIXES = {
  401: t("The API key is missing or wrong"),
  408: t("The message arrived too slowly"),
  429: t("The swarm is overloaded"),
  503: t("The swarm is unavailable"),
};

export function sentence(status, told, after = 0) {
  const begin = PREFIXES[status] ?? (told ? "" : t("The endpoint returned status {status}", { status }));
  const rest = told && begin ? `: ${told}` : told;
  const text = ended(begin + rest);
  // Only an overloaded swarm knows when it has room again.
  return status === 429 && after > 0 ? `${text} ${t("Try again in {after} s.", { after })}` : text;
}

function ended(text) {
  const trimmed = text.trim();
  const first = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?。！？]$/.test(first) ? first : first + ".";
}

// Yield the objects of an event stream until [DONE]; throws EndpointError on an error event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", over = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const line = block.split("\n").find((one) => one.startsWith("data: "));
        if (!line) continue;
        if (line === "data: [DONE]") { over = true; continue; }
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new EndpointError(ended(String(event.error.message)), 500);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof EndpointError || error.name === "AbortError") throw error;
    throw new EndpointError(t("The connection to the endpoint was lost."));
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!over) throw new EndpointError(t("The endpoint closed the stream before the answer was complete."));
}

// Yield the objects of a response with one per line; throws EndpointError on an error object.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch {
      throw new EndpointError(t("The connection to the endpoint was lost."));
    }
    const whole = (rest + (part.value ?? "")).split("\n");
    rest = whole.pop();
    for (const line of whole) {
      const one = JSON.parse(line);
      if (one.error) throw new EndpointError(ended(String(one.error.message ?? one.error)), 500);
      yield one;
    }
    if (part.done) return;
  }
}
