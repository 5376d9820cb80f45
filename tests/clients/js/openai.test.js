// OpenAI's own library for JavaScript. Greedy answers must be the one that the Python side found right.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { River, Weather, riverQuestion, weatherQuestion } from "./shapes.js";
import { baseURL, apiKey, golden, maxTokens, model, question } from "./settings.js";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 100_000 });
const messages = [{ role: "user", content: question }];
const greedy = { model, messages, max_tokens: maxTokens, temperature: 0 };

test("chat gives the reference answer with usage", async () => {
  const answer = await client.chat.completions.create(greedy);
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.choices[0].message.content, golden);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, maxTokens);
});

test("streamed chat adds up to the reference answer and ends in usage", async () => {
  const stream = await client.chat.completions.create({
    ...greedy,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, maxTokens);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), golden);
});

test("stream helper collects the same completion", async () => {
  const stop = golden.slice(60, 64);
  const runner = client.chat.completions.stream({ ...greedy, max_tokens: undefined, stop });
  let seen = "";
  runner.on("content", (delta) => (seen += delta));
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.content, golden.slice(0, golden.indexOf(stop)));
  assert.equal(seen, final.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, "stop");
});

test("completions and models", async () => {
  const answer = await client.completions.create({ model, prompt: ["One, two,", "A, B,"], max_tokens: 3 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  const names = [];
  for await (const card of client.models.list()) names.push(card.id);
  assert.deepEqual(names, [model]);
});

test("leaving a stream early is no error", async () => {
  const stream = await client.chat.completions.create({ ...greedy, max_tokens: 400, stream: true });
  let count = 0;
  for await (const _ of stream) if (++count === 3) break;
  assert.equal(count, 3);
});

test("errors are the exceptions that the library documents", async () => {
  const ask = (fields, options) => client.chat.completions.create({ ...greedy, ...fields }, options);
  await assert.rejects(ask({ temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(ask({ stream: true, n: 0 }), OpenAI.BadRequestError);
  await assert.rejects(ask({ model: "someone-elses" }), OpenAI.NotFoundError);
  const stranger = new OpenAI({ baseURL, apiKey: "pds-of-nobody", maxRetries: 0 });
  await assert.rejects(stranger.chat.completions.create(greedy), OpenAI.AuthenticationError);
});

test("parse gives an object of the schema", async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages: [{ role: "user", content: riverQuestion }],
    response_format: zodResponseFormat(River, "river"),
    temperature: 1,
    seed: 3,
  });
  River.parse(answer.choices[0].message.parsed);
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("streamed tool call is the same as the whole one", async () => {
  const ask = {
    model,
    messages: [{ role: "user", content: weatherQuestion }],
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    tool_choice: "required",
    temperature: 0,
  };
  const whole = (await client.chat.completions.parse(ask)).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  for (const call of whole.message.tool_calls) Weather.parse(call.function.parsed_arguments);
  const streamed = (await client.chat.completions.stream(ask).finalChatCompletion()).choices[0];
  const said = (choice) => choice.message.tool_calls.map((call) => call.function.arguments);
  assert.deepEqual(said(streamed), said(whole));
});

test("log probabilities name the greedy token first", async () => {
  const answer = await client.chat.completions.create({ ...greedy, logprobs: true, top_logprobs: 2 });
  const content = answer.choices[0].logprobs.content;
  assert.equal(content.length, maxTokens);
  for (const entry of content) assert.equal(entry.top_logprobs[0].token, entry.token);
});
