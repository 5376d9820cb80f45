"""Entries go out with their text, the same streamed or whole, and read as OpenAI and vLLM write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pdserve.gateway.api.parsed_request import Kind, ParsedRequest
from pdserve.gateway.api.text import TextOptions, Tokenizer
from pdserve.gateway.reply import Reply
from pdserve.transfer.messages import TokenLogprobs
from pdserve.transfer.sampling_params import SamplingParams
from tests.gateway.api.test_text import KINDS

Tokenizers = dict[str, Tokenizer]


def request_of(kind: Kind, **changes: Any) -> ParsedRequest:
    fields: dict[str, Any] = {
        "kind": kind, "model": "demo", "prompts": ((70, 71),), "n": 1,
        "params": (SamplingParams(max_tokens=99, seed=1),), "text": TextOptions(), "stream": False,
        "include_usage": False, "continuous_usage": False, "return_token_ids": False, "echo_texts": (),
        "cache_salt": "", "priority": 0, "logprobs": 2,
    }  # fmt: skip
    return ParsedRequest(**fields | changes)


def said(token: int, logprob: float | None = None) -> TokenLogprobs:
    """Made up, but never the same for two tokens. The token itself is the second most likely one."""
    own = -token / 1000 - 0.5 if logprob is None else logprob
    return TokenLogprobs(own, 2, [(token + 1, own / 2), (token, own), (token + 2, own * 2)])


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Its tokens, without the BOS."""
    return [token for token in tokenizer.encode(text) if token > 2]


def feed(reply: Reply, tokens: list[int], choice: int = 0, finish: str = "length") -> None:
    for place, token in enumerate(tokens, start=1):
        last = place == len(tokens)
        if reply.token(choice, token, finish if last else "", said(token)):  # type: ignore[arg-type]
            return


def whole(request: ParsedRequest, tokenizer: Tokenizer, tokens: list[int]) -> dict[str, Any]:
    reply = Reply(request, tokenizer)
    feed(reply, tokens)
    choice: dict[str, Any] = json.loads(reply.body())["choices"][0]
    return choice


def streamed(request: ParsedRequest, tokenizer: Tokenizer, tokens: list[int]) -> list[dict[str, Any]]:
    reply = Reply(request, tokenizer)
    feed(reply, tokens)
    events = reply.events.take_now().decode("ascii").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event]


@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(),
    stops=st.lists(st.sampled_from(["the", "e", "e q", " ", "\ufffd", "好"]), max_size=2),
    skip=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_entries_come_with_their_text_and_streamed_ones_add_up_to_the_whole(
    tokenizers: Tokenizers, kind: str, data: st.DataObject, stops: list[str], skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    known = ids_of(tokenizer, "the quick brown fox 你好 👩‍👩‍👧 é end") or [3]
    tokens = data.draw(
        st.lists(st.sampled_from(known) | st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12)
    )
    text = TextOptions(stop=tuple(dict.fromkeys(stops)), skip_special_tokens=skip)
    plain = whole(request_of("completion", text=text), tokenizer, tokens)
    columns: dict[str, list[Any]] = {name: [] for name in plain["logprobs"]}
    shown = 0
    for event in streamed(request_of("completion", text=text, stream=True), tokenizer, tokens):
        (choice,) = event["choices"]
        shown += len(choice["text"])
        for name, values in (choice["logprobs"] or {}).items():
            columns[name] += values
        assert all(offset <= shown for offset in columns["text_offset"]), "no entry before its text"
    assert columns == plain["logprobs"]
    offsets = plain["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    if plain["finish_reason"] == "stop":
        assert all(offset <= len(plain["text"]) for offset in offsets)  # equal: a token without text before the cut
    else:
        assert plain["logprobs"]["token_logprobs"] == [said(token).logprob for token in tokens]


def test_half_characters_keep_their_entries_until_the_character_is_whole(tokenizer: Tokenizer) -> None:
    smile = ids_of(tokenizer, "😀")
    assert len(smile) > 1, "no token holds the whole character"
    chunks = streamed(request_of("chat", stream=True), tokenizer, [*smile, *ids_of(tokenizer, "a")])
    parts = [(c["choices"][0]["delta"].get("content"), c["choices"][0]["logprobs"]) for c in chunks[1:]]
    assert [text for text, _ in parts] == ["😀", "a"]
    content = parts[0][1]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "😀".encode()
    assert content[0]["token"].startswith("\\xf0")
    assert whole(request_of("completion"), tokenizer, smile)["logprobs"]["tokens"][0] == f"bytes:{content[0]['token']}"


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "gemma_like"])
def test_bytes_of_a_text_add_up_to_it(tokenizers: Tokenizers, kind: str) -> None:
    tokens = ids_of(tokenizers[kind], "the 你好 end")
    choice = whole(request_of("chat"), tokenizers[kind], tokens)
    raw = b"".join(bytes(entry["bytes"] or []) for entry in choice["logprobs"]["content"])
    assert raw.decode().lstrip(" ") == choice["message"]["content"].lstrip(" ") == "the 你好 end"


def test_special_tokens_are_named_and_put_no_bytes_into_a_text_that_skips_them(tokenizer: Tokenizer) -> None:
    (entry,) = whole(request_of("chat"), tokenizer, [2])["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("</s>", None)
    shown = TextOptions(skip_special_tokens=False)
    (entry,) = whole(request_of("chat", text=shown), tokenizer, [2])["logprobs"]["content"]
    assert (entry["token"], bytes(entry["bytes"])) == ("</s>", b"</s>")


def test_what_a_stop_string_cuts_off_takes_its_entries_along(tokenizer: Tokenizer) -> None:
    tokens = [token for letter in "abcxyz" for token in ids_of(tokenizer, letter)]
    choice = whole(request_of("completion", text=TextOptions(stop=("cx",))), tokenizer, tokens)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["a", "b"])
    kept = TextOptions(stop=("cx",), include_stop=True)
    assert whole(request_of("completion", text=kept), tokenizer, tokens)["logprobs"]["tokens"] == list("abcx")


def test_the_sdk_reads_every_shape(tokenizer: Tokenizer) -> None:
    tokens = ids_of(tokenizer, "the end")
    reply = Reply(request_of("chat"), tokenizer)
    feed(reply, tokens)
    chat = ChatCompletion.model_validate_json(reply.body(), strict=True)
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    first = chat.choices[0].logprobs.content[0]
    assert first.logprob == said(tokens[0]).logprob
    assert [top.logprob for top in first.top_logprobs] == [pair[1] for pair in said(tokens[0]).top[:2]]
    for chunk in streamed(request_of("chat", stream=True), tokenizer, tokens):
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    reply = Reply(request_of("completion", logprobs=0), tokenizer)
    feed(reply, tokens)
    completion = Completion.model_validate_json(reply.body(), strict=True).choices[0].logprobs
    assert completion is not None
    assert completion.top_logprobs is not None
    assert [len(tops) for tops in completion.top_logprobs] == [1] * len(tokens), "the token itself is always in"


def test_without_asking_there_are_none(tokenizer: Tokenizer) -> None:
    choice = whole(request_of("chat", logprobs=None), tokenizer, ids_of(tokenizer, "the end"))
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in choice


def test_an_echoed_prompt_begins_the_arrays_with_null_and_its_bos_has_no_place_of_its_own(tokenizer: Tokenizer) -> None:
    prompt = (1, *ids_of(tokenizer, "the fox"))
    request = request_of("completion", prompts=(prompt,), echo_texts=("the fox",), prompt_logprobs=1, stream=False)
    reply = Reply(request, tokenizer)
    reply.prompt_logprobs(0, [said(token) for token in prompt[1:]])
    feed(reply, ids_of(tokenizer, " end"))
    (choice,) = json.loads(reply.body())["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "the fox end"
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == "<s>the fox end" or logprobs["tokens"][0] == "<s>"
    shown = list(zip(logprobs["text_offset"], logprobs["tokens"], strict=True))[1:]
    assert logprobs["text_offset"][0] == 0
    assert all(choice["text"].startswith(token, offset) for offset, token in shown)
    assert choice["prompt_logprobs"][0] is None
    own = choice["prompt_logprobs"][1][str(prompt[1])]
    assert own == {"logprob": said(prompt[1]).logprob, "rank": 2, "decoded_token": logprobs["tokens"][1]}
    assert len(choice["prompt_logprobs"][1]) == 2, "the likeliest one and the token itself"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_says_what_is_to_be_said_of_the_prompt_once_per_choice(tokenizer: Tokenizer, kind: Kind) -> None:
    request = request_of(kind, stream=True, prompt_logprobs=0, n=2 if kind == "completion" else 1)
    reply = Reply(request, tokenizer)
    reply.prompt_logprobs(0, [said(71)])
    for choice in range(request.n):
        feed(reply, ids_of(tokenizer, "the end"), choice)
    chunks = [json.loads(event[6:]) for event in reply.events.take_now().decode().split("\n\n") if event]
    holders = chunks if kind == "chat" else [chunk["choices"][0] for chunk in chunks]
    assert [holder.get("prompt_logprobs") for holder in holders if "prompt_logprobs" in holder] == [
        [
            None,
            {
                "71": {
                    "logprob": said(71).logprob,
                    "rank": 2,
                    "decoded_token": tokenizer.decode([71], skip_special_tokens=True),
                }
            },
        ]
    ] * request.n


def test_the_best_of_several_are_those_with_the_highest_mean(tokenizer: Tokenizer) -> None:
    reply = Reply(request_of("completion", n=2, best_of=4, logprobs=None), tokenizer)
    a, b, c, d = (ids_of(tokenizer, letter)[0] for letter in "abcd")
    for choice, values in enumerate([[(a, -1.0)], [(b, -0.5), (b, -0.7)], [(c, -0.1), (c, -3.0)], [(d, -0.9)]]):
        for place, (token, value) in enumerate(values, start=1):
            reply.token(choice, token, "length" if place == len(values) else "", said(token, value))
    body = json.loads(reply.body())
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in body["choices"]] == [
        (0, "bb", None), (1, "d", None),
    ]  # fmt: skip
    assert body["usage"]["completion_tokens"] == 6, "all that were generated"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_its_text_and_its_entries(tokenizer: Tokenizer, stream: bool) -> None:
    prompt = tuple(ids_of(tokenizer, "the fox"))
    reply = Reply(request_of("completion", prompts=(prompt,), echo_texts=("the fox",), stream=stream), tokenizer)
    reply.prompt_logprobs(0, [said(token) for token in prompt[1:]])
    reply.late_finish(0, "length")
    raw = reply.events.take_now().decode().removeprefix("data: ") if stream else reply.body()
    (choice,) = json.loads(raw)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the fox", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *(said(token).logprob for token in prompt[1:])]
    assert "".join(choice["logprobs"]["tokens"]) == "the fox"
