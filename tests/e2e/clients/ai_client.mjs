// The AI SDK against an endpoint: node ai_client.mjs URL MODEL

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const schema = z.object({ city: z.string().max(9), days: z.number().int().min(1).max(9) });
const prompt = "What is molink?";
const openai = createOpenAI({ baseURL: url, apiKey: "-" });
const compatible = createOpenAICompatible({
  name: "molink",
  baseURL: url,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  responses: openai(name),
  chat: openai.chat(name),
  compatible: compatible(name),
};

for (const [kind, model] of Object.entries(models)) {
  // Nothing is kept, so that items can't be sent by their ids.
  const providerOptions = { openai: { store: false } };
  const common = { model, prompt, maxOutputTokens: 400, maxRetries: 0, providerOptions };
  const ran = [];
  const tools = {
    get_weather: tool({
      description: "Looks up the weather.",
      inputSchema: schema,
      execute: async (asked) => {
        ran.push(asked);
        return "warm";
      },
    }),
  };

  const whole = await generateText(common);
  assert.ok(whole.text, kind);
  assert.ok(whole.usage.outputTokens > 0, kind);

  const streamed = streamText({ ...common, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, await streamed.text, kind);
  assert.ok(text, kind);
  assert.ok((await streamed.usage).outputTokens > 0, kind);

  const forced = await generateText({ ...common, tools, toolChoice: "required" });
  assert.equal(forced.toolCalls[0].toolName, "get_weather", kind);
  schema.parse(forced.toolCalls[0].input);
  assert.equal(forced.finishReason, "tool-calls", kind);
  assert.ok(ran.length, kind);

  // The next step goes back with the call and its result.
  const steps = await generateText({
    ...common,
    tools,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    stopWhen: stepCountIs(2),
  });
  assert.equal(steps.steps.length, 2, kind);

  const calls = streamText({ ...common, tools, toolChoice: "required" });
  const kinds = new Set();
  for await (const part of calls.fullStream) {
    if (part.type === "error") throw part.error;
    kinds.add(part.type);
  }
  assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-call"), `${kind}: ${[...kinds]}`);

  schema.parse((await generateObject({ ...common, schema })).object);
  const object = streamObject({ ...common, schema });
  for await (const _ of object.partialObjectStream);
  schema.parse(await object.object);
}

const version = (each) =>
  JSON.parse(readFileSync(new URL(`./node_modules/${each}/package.json`, import.meta.url))).version;
const packages = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"];
console.log(JSON.stringify(Object.fromEntries(packages.map((each) => [each, version(each)]))));
