// The AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
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
