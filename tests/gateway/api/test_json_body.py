"""Hostile bodies: whatever the bytes and whatever the values, the answer is a parsed request or a 400 (404)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.json_body import MAX_NESTING
from pdserve.gateway.api.parsed_request import ModelLimits, ParsedRequest
from pdserve.gateway.api.parsing import parse_chat, parse_completion
from pdserve.gateway.api.text import Tokenizer

LIMITS = ModelLimits(names=("demo",), max_model_len=256, pool_tokens=200)
HELLO = [{"role": "user", "content": "hello"}]


def encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def outcome(parse: Any, body: bytes, tokenizer: Tokenizer) -> ParsedRequest | ApiError:
    """What became of a body; any other exception fails the test."""
    try:
        request: ParsedRequest = parse(body, tokenizer, LIMITS)
    except ApiError as error:
        return error
    return request


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"7", b"\xff{}", b"\xef\xbb\xbf{}", b'{"a": NaN}', b'{"a": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 100_000, b'{"model": "demo", "a": "\\ud800"}',
        b'{"model": "demo", "\\udc00": 1}', b'{"model": "demo" "prompt": 1}', b"{'model': 1}",
    ],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_a_400(tokenizer: Tokenizer, body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body, tokenizer, LIMITS)
        assert caught.value.status == 400
        json.dumps(caught.value.body()).encode()


def test_infinite_numbers_in_disguise_are_refused(tokenizer: Tokenizer) -> None:
    body = b'{"model": "demo", "prompt": "x", "temperature": 1e999}'
    with pytest.raises(ApiError) as caught:
        parse_completion(body, tokenizer, LIMITS)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("levels", [MAX_NESTING, MAX_NESTING + 1, 900, 100_000])
@pytest.mark.parametrize(
    ("before", "behind", "field"),
    [
        (b'"chat_template_kwargs":{"a":', b"}", "chat_template_kwargs"),
        (b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"items":', b"}}}",
         "response_format"),
        (b'"tool_choice":"required","tools":[{"type":"function","function":{"name":"f","parameters":{"x":', b"}}}]",
         "tools"),
        (b'"metadata":', b"", "metadata"), (b'"whatever":', b"", "whatever"),
    ],
)  # fmt: skip
def test_nesting_that_recursion_could_not_follow_is_refused_where_it_is(
    tokenizer: Tokenizer, before: bytes, behind: bytes, field: str, levels: int
) -> None:
    deep = b'{"items":' * levels + b"{}" + b"}" * levels
    body = b'{"model":"demo","messages":[{"role":"user","content":"x"}],' + before + deep + behind + b"}"
    result = outcome(parse_chat, body, tokenizer)
    assert isinstance(result, ApiError)
    assert result.status == 400
    assert result.param == (None if levels == 100_000 else field)


def test_a_long_prompt_of_brackets_is_not_nesting(tokenizer: Tokenizer) -> None:
    body = encode({"model": "demo", "prompt": [[5]] * 200, "max_tokens": 1})
    assert isinstance(outcome(parse_completion, body, tokenizer), ParsedRequest)
    body = encode({"model": "demo", "prompt": "[" * 150})
    assert isinstance(outcome(parse_completion, body, tokenizer), ParsedRequest)


def test_json_within_json_is_held_to_the_same(tokenizer: Tokenizer) -> None:
    for inner in (r'{"a": "\ud800"}', r'{"\ud800": 1}', '{"a":' * 300 + "1" + "}" * 300, '{"a": NaN}'):
        refused = outcome(parse_chat, encode({"model": "demo", "messages": HELLO, "guided_json": inner}), tokenizer)
        assert isinstance(refused, ApiError)
        assert (refused.status, refused.param) == (400, "guided_json")
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": inner}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
        taken = outcome(parse_chat, encode({"model": "demo", "messages": messages}), tokenizer)
        assert isinstance(taken, ParsedRequest) or taken.code == "context_length_exceeded"


def test_what_an_error_quotes_is_cut(tokenizer: Tokenizer) -> None:
    for fields in (
        {"metadata": {"k" * 100_000: 1}},
        {"logit_bias": {"k" * 100_000: 1}},
        {"bootstrap_" + "k" * 9999: 1},
    ):
        refused = outcome(parse_chat, encode({"model": "demo", "messages": HELLO} | fields), tokenizer)
        assert isinstance(refused, ApiError)
        assert len(json.dumps(refused.body())) < 2500


FIELDS = [
    "model", "prompt", "messages", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "echo",
    "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "return_token_ids", "priority", "cache_salt", "logprobs", "top_logprobs", "response_format",
    "tools", "tool_choice", "best_of", "suffix", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "modalities", "guided_json", "functions",
]  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([2**63, 10**30, "\ud800", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
@settings(max_examples=600)
def test_no_value_of_any_field_is_anything_but_parsed_or_refused(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    body = encode({"model": "demo", "prompt": "x", "messages": HELLO} | fields)
    for parse in (parse_chat, parse_completion):
        result = outcome(parse, body, tokenizer)
        if isinstance(result, ApiError):
            assert result.status in (400, 404)
            assert result.param is not None or "JSON" in result.message or "name" in result.message
            json.dumps(result.body())
        else:
            assert all(0 < params.max_tokens <= 200 for params in result.params)


@given(body=st.binary(max_size=40))
def test_no_bytes_are_anything_but_parsed_or_refused(tokenizer: Tokenizer, body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError):
            parse(body, tokenizer, LIMITS)


@given(
    key=st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content"]),
    value=JSON,
)
@settings(max_examples=300)
def test_no_member_of_a_message_is_anything_but_parsed_or_refused(tokenizer: Tokenizer, key: str, value: Any) -> None:
    body = encode({"model": "demo", "messages": [{"role": "user", "content": "x", key: value}]})
    result = outcome(parse_chat, body, tokenizer)
    assert isinstance(result, ParsedRequest) or result.status == 400


def test_a_text_that_cannot_fit_is_refused_without_reading_it_as_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "_encode", unread)
    long = "ab" * 1_000_000
    for parse, field, value in (
        (parse_completion, "prompt", long),
        (parse_completion, "prompt", ["a" * 9_000_000]),
        (parse_chat, "messages", [{"role": "user", "content": long}]),
    ):
        refused = outcome(parse, encode({"model": "demo", field: value}), tokenizer)
        assert isinstance(refused, ApiError)
        assert (refused.status, refused.param, refused.code) == (400, field, "context_length_exceeded")


def test_no_text_that_fits_is_refused_for_its_length(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        vocabulary = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.vocab_size)]
        for text in (max(vocabulary, key=len) * 3, "e\u0301" * 50, "  " * 40, "</s>   " * 9, "\u4f60" * 9, "w" * 500):
            tokenizer.require_fit(text, len(tokenizer.encode(text)), "prompt")
