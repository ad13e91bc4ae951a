// The npm client `openai` against an endpoint: node openai_client.mjs URL MODEL

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "What is molink?" }];
const input = "What is molink?";
const Weather = z.object({ city: z.string().max(9), days: z.number().int().min(1).max(9) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 9 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const common = { model, messages, max_tokens: 400, temperature: 0.5, seed: 1 };

const listed = [];
for await (const each of client.models.list()) listed.push(each.id);
assert.ok(listed.includes(model));

const answer = await client.chat.completions.create(common);
assert.ok(answer.choices[0].message.content);

const stream = client.chat.completions.stream({
  ...common,
  stream_options: { include_usage: true },
});
let text = "";
stream.on("content", (delta) => (text += delta));
const final = await stream.finalChatCompletion();
assert.equal(text, final.choices[0].message.content);
assert.ok(final.usage.completion_tokens > 0);

const called = client.chat.completions.stream({ ...common, tools, tool_choice: "required" });
const [call] = (await called.finalChatCompletion()).choices[0].message.tool_calls;
assert.equal(call.function.name, "get_weather");
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);

const ran = [];
const runner = client.chat.completions.runTools({
  ...common,
  tool_choice: { type: "function", function: { name: "get_weather" } },
  tools: [
    {
      type: "function",
      function: { name: "get_weather", parameters, parse: JSON.parse, function: (a) => ran.push(a) },
    },
  ],
});
await runner.done();
assert.ok(ran.length);

const parsed = await client.chat.completions.parse({
  ...common,
  response_format: zodResponseFormat(Weather, "weather"),
});
Weather.parse(parsed.choices[0].message.parsed);

const said = await client.responses.create({ model, input, max_output_tokens: 400 });
assert.ok(said.output_text);
const events = [];
const responses = client.responses.stream({
  model,
  input,
  max_output_tokens: 400,
  tools: [{ type: "function", name: "get_weather", parameters, strict: true }],
  tool_choice: "required",
});
for await (const event of responses) events.push(event.type);
const done = await responses.finalResponse();
const [item] = done.output.filter((each) => each.type === "function_call");
assert.equal(item.name, "get_weather");
assert.ok(events.includes("response.function_call_arguments.done"));
const formed = await client.responses.parse({
  model,
  input,
  max_output_tokens: 400,
  text: { format: zodTextFormat(Weather, "weather") },
});
Weather.parse(formed.output_parsed);

const version = (name) =>
  JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version;
console.log(JSON.stringify({ openai: version("openai"), node: process.version }));
