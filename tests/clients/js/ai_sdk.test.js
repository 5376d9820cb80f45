// The AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, streamText, tool } from "ai";
import { River, Weather, riverQuestion, weatherQuestion } from "./shapes.js";
import { baseURL, apiKey, golden, maxTokens, model, question } from "./settings.js";

const provider = createOpenAICompatible({ name: "pdserve", baseURL, apiKey, includeUsage: true });
const settings = { model: provider(model), maxRetries: 0, temperature: 0, maxOutputTokens: maxTokens };

test("generateText gives the reference answer", async () => {
  const result = await generateText({ ...settings, prompt: question });
  assert.equal(result.text, golden);
  assert.equal(result.finishReason, "length");
  assert.equal(result.usage.outputTokens, maxTokens);
  assert.deepEqual(result.warnings, []);
});

test("streamText gives it in pieces, with usage", async () => {
  const result = streamText({ ...settings, prompt: question });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), golden);
  assert.ok(pieces.length > maxTokens / 2);
  assert.equal(await result.finishReason, "length");
  assert.equal((await result.usage).outputTokens, maxTokens);
});

test("text of the completions endpoint", async () => {
  const result = await generateText({
    ...settings,
    model: provider.completionModel(model),
    prompt: "The capital of France is",
  });
  assert.ok(result.text.length > 0);
});

test("a refusal is an error with the status and the server's words", async () => {
  await assert.rejects(generateText({ ...settings, temperature: 3, prompt: question }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature/);
    return true;
  });
});

const strict = createOpenAICompatible({ name: "pdserve", baseURL, apiKey, supportsStructuredOutputs: true });
const structured = { model: strict(model), maxRetries: 0 };

test("Output.object and generateObject give an object of the schema", async () => {
  const asked = { ...structured, prompt: riverQuestion, temperature: 1, seed: 5 };
  const result = await generateText({ ...asked, output: Output.object({ schema: River }) });
  River.parse(result.output);
  River.parse((await generateObject({ ...asked, schema: River })).object);
});

test("streamed objects grow into the whole one", async () => {
  const result = streamText({
    ...structured,
    prompt: riverQuestion,
    temperature: 0,
    output: Output.object({ schema: River }),
  });
  const partial = [];
  for await (const part of result.partialOutputStream) partial.push(part);
  River.parse(partial.at(-1));
  assert.ok(partial.length > 2);
});

test("a tool is called, and its result goes back", async () => {
  const seen = [];
  const weather = tool({
    description: "The weather of a city, now.",
    inputSchema: Weather,
    execute: async (input) => {
      seen.push(input);
      return "4 degrees, rain";
    },
  });
  const asked = { ...structured, prompt: weatherQuestion, tools: { weather }, temperature: 0 };
  const called = await generateText({ ...asked, toolChoice: "required" });
  assert.ok(called.toolCalls.length > 0);
  assert.equal(called.finishReason, "tool-calls");
  for (const input of seen) Weather.parse(input);
  assert.equal(seen.length, called.toolCalls.length);
  const streamed = streamText({ ...asked, toolChoice: "required" });
  await streamed.consumeStream();
  assert.deepEqual((await streamed.toolCalls).map((c) => c.input), called.toolCalls.map((c) => c.input));
  const messages = [{ role: "user", content: weatherQuestion }, ...called.response.messages];
  const last = { ...structured, messages, tools: { weather }, toolChoice: "none", maxOutputTokens: 12 };
  const after = await generateText(last);
  assert.ok(after.text.length > 0);
});
