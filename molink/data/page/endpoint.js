// The endpoint: requests, streams, and its errors as sentences.

const KEY = "molink.key";

export class EndpointError extends Error {
  constructor(message, status = 0, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* a browser that keeps nothing */ }

export const apiKey = () => key;

export function setApiKey(text) {
  key = text.trim();
  try { sessionStorage.setItem(KEY, key); } catch { /* then until the page is left */ }
}

// The answer to a request, which is a good one; raises EndpointError.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = "Bearer " + encodeKey(key);
  const options = { headers, signal, cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new EndpointError("The endpoint does not answer. Is molink running on that PC?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

// A header takes Latin-1 only; the endpoint reads it as UTF-8.
function encodeKey(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function refusal(response) {
  let told = "";
  try {
    told = String((await response.json()).error.message ?? "");
  } catch { /* a proxy in between, or nothing that is ours */ }
  const after = Number(response.headers.get("Retry-After")) || 0;
  return new EndpointError(sentence(response.status, told, after), response.status, after);
}

const BEGINNINGS = {
  401: "The API key is missing or wrong",
  408: "The endpoint waited too long for the message",
  429: "All places are taken",
  503: "The swarm can't answer now",
};

export function sentence(status, told, after = 0) {
  const begin = BEGINNINGS[status] ?? (told ? "" : `The endpoint answered with status ${status}`);
  const rest = told && begin ? `: ${told}` : told;
  const text = ended(begin + rest);
  return after > 0 ? `${text} It may work again in ${after} s.` : text;
}

function ended(text) {
  const trimmed = text.trim();
  const first = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(first) ? first : first + ".";
}

// The objects of a stream, until its end; raises EndpointError for one that says why it ends.
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
    throw new EndpointError("The connection to the endpoint broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!over) throw new EndpointError("The endpoint ended the answer before it was complete.");
}
