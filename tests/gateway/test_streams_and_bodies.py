"""Whatever a request asks for together: its stream, put together, says what its body says, to the last member."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pdserve.engine.checkpoint import resolve
from pdserve.gateway.api.chat_output import Calling, OutputFormat
from pdserve.gateway.api.parsed_request import ModelLimits, ParsedRequest
from pdserve.gateway.api.parsing import parse_chat, parse_completion
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.reply import Reply
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.messages import Finish, TokenLogprobs

LIMITS = ModelLimits(("m",), 100_000, 100_000)
EOS = 2
CASES = 400
PIECES = [
    "<think>", "</think>", "\n\n", "why 你", "Hm. ", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ',
    '{"a": "你👍", "b": [1, {"c": null}]}', '{"name": "g", "arguments": {}}', "}", '{"a": "st', 'op"}',
    '[{"name": "f", "parameters": {"x": "}"}}, ', '{"name": "g", "parameters": {}}]', "[TOOL_CALLS]", "<|python_tag|>",
    ";", "city", "é", "👩‍👩‍👧", "aaa", "STOP", "ST", "a b", " ", "\u2028", '"', "\\", "<|im_end|>",
]  # fmt: skip
STOPS = ["STOP", "a", "你", "é", "\n\n", "}", "</think>", "</tool_call>", '"a"', "👍", "tool", "\u2028", " b", "name"]
CALLINGS = [
    None,
    *(Calling("auto", ("f", "g"), parser, parallel) for parser in ("hermes", "llama3_json", "mistral")  # type: ignore[arg-type]
      for parallel in (True, False)),
    Calling("auto", ("f", "g"), parallel=False, legacy=True), Calling("required", ("f", "g")),
    Calling("required", ("f", "g"), parallel=False), Calling("named", ("f",), parallel=False),
    Calling("named", ("f",), parallel=False, legacy=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    try:
        return Tokenizer(resolve("demo"))
    except ConfigError as error:
        pytest.skip(str(error))


def random_request(rng: random.Random, tokenizer: Tokenizer) -> ParsedRequest:
    def sometimes(**fields: Any) -> dict[str, Any]:
        return fields if rng.random() < 0.4 else {}

    body: dict[str, Any] = {"model": "m", "n": rng.randint(1, 3), "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": rng.random() < 0.3}}
    body |= sometimes(stop=rng.sample(STOPS, rng.randint(1, 3))) | sometimes(include_stop_str_in_output=True)
    body |= sometimes(min_tokens=rng.randint(1, 8)) | sometimes(skip_special_tokens=False)
    body |= sometimes(return_token_ids=True) | sometimes(prompt_logprobs=1)
    if rng.random() < 0.3:
        body |= {"prompt": rng.choice(["é👍 x", ["ab", "c 你"]])} | sometimes(echo=True) | sometimes(logprobs=1)
        return parse_completion(json.dumps(body).encode(), tokenizer, LIMITS)
    body |= {"messages": [{"role": "user", "content": "hi"}]} | sometimes(logprobs=True, top_logprobs=1)
    parsed = parse_chat(json.dumps(body).encode(), tokenizer, LIMITS)
    return replace(parsed, output=OutputFormat(rng.choice(CALLINGS), rng.choice([None, None, "yes", "maybe", "no"])))


@dataclass
class Choice:
    """One choice's tokens, and how it ends: with the last one, or afterwards."""

    ids: list[int]
    finish: Finish
    late: bool

    @classmethod
    def drawn(cls, rng: random.Random, tokenizer: Tokenizer) -> Choice:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 8)))
        ids = tokenizer.encode(text)[:40] if rng.random() < 0.8 else [rng.randrange(3, 400) for _ in range(9)]
        finish: Finish = rng.choice(["stop", "length"])
        late = rng.random() < 0.5
        return cls([*ids, EOS] if finish == "stop" and not late else ids, finish, late)


def said_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(-1.5, 1, [(token, -1.5)])


def answer(parsed: ParsedRequest, tokenizer: Tokenizer, choices: list[Choice], rng: random.Random) -> bytes:
    """The whole body, or all events; the choices' tokens come in any order among each other."""
    reply = Reply(parsed, tokenizer)
    for number, prompt in enumerate(parsed.prompts):
        if parsed.params[number].prompt_logprobs is not None:
            reply.prompt_logprobs(number * parsed.n, [said_of(token) for token in prompt[1:]])
    left = {number: list(enumerate(choice.ids)) for number, choice in enumerate(choices)}
    while left:
        number = rng.choice(list(left))
        choice, tokens = choices[number], left[number]
        if not tokens:
            reply.late_finish(number, choice.finish)
            del left[number]
            continue
        _, token = tokens.pop(0)
        last = not tokens and not choice.late
        logprobs = said_of(token) if parsed.logprobs is not None else None
        if reply.token(number, token, choice.finish if last else "", logprobs):
            del left[number]
    if not parsed.stream:
        return reply.body()
    reply.end_stream()
    return reply.events.take_now()


@dataclass
class Told:
    """What a client knows of one choice at the end."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str = ""
    prompt_logprobs: Any = None
    role: str = ""

    def add(self, choice: dict[str, Any]) -> None:
        assert not self.finish_reason, "nothing follows the finish reason"
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        self.role += message.get("role", "")
        self.text += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or ""
        legacy = [{"function": message["function_call"]}] if "function_call" in message else []
        for call in message.get("tool_calls", legacy):
            if "name" in call["function"]:
                self.calls.append([call["function"]["name"], ""])
            self.calls[-1][1] += call["function"].get("arguments", "")
        self.token_ids += choice.get("token_ids", [])
        for name, values in (choice["logprobs"] or {}).items():
            if values:
                self.entries.setdefault(name, []).extend(values)
        self.finish_reason = choice["finish_reason"] or ""
        self.prompt_logprobs = self.prompt_logprobs or choice.get("prompt_logprobs")


def told(answers: list[Any]) -> tuple[dict[int, Told], Any]:
    """Each choice, and what stands beside `choices`."""
    choices: dict[int, Told] = {}
    beside: dict[str, Any] = {}
    for one in answers:
        for choice in one["choices"]:
            choices.setdefault(choice["index"], Told()).add(choice)
        beside |= {name: one[name] for name in ("usage", "prompt_logprobs", "prompt_token_ids") if name in one}
    return choices, beside


def test_a_stream_says_what_the_body_says_whatever_is_asked_for_together(demo: Tokenizer) -> None:
    rng = random.Random(20261201)
    for _ in range(CASES):
        parsed = random_request(rng, demo)
        choices = [Choice.drawn(rng, demo) for _ in range(parsed.num_choices)]
        whole = json.loads(answer(replace(parsed, stream=False), demo, choices, rng))
        *events, done, rest = answer(parsed, demo, choices, rng).decode("ascii").split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert all("usage" in chunk for chunk in chunks)
        assert told(chunks) == told([whole]), parsed
        entries = sum(len(next(iter(one.entries.values()), [])) for one in told([whole])[0].values())
        if parsed.logprobs is not None and not parsed.text.stop:
            echoed = parsed.n * parsed.prompt_tokens if parsed.echo_texts and parsed.kind == "completion" else 0
            assert entries == whole["usage"]["completion_tokens"] + echoed


def test_a_streamed_completion_says_its_prompts_log_probabilities_before_any_text_is_there(demo: Tokenizer) -> None:
    body = {"model": "m", "prompt": "hello", "stream": True, "prompt_logprobs": 0}
    parsed = parse_completion(json.dumps(body).encode(), demo, LIMITS)
    half, *others = demo.encode("👍")
    events = answer(parsed, demo, [Choice([half, *others], "length", late=False)], random.Random(0))
    first = json.loads(events.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]
    assert (first["text"], len(first["prompt_logprobs"])) == ("👍", len(parsed.prompts[0]))
