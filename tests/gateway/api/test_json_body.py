"""Hostile bodies: whatever the bytes and whatever the values, the answer is a parsed request or a 400 (404)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gateway.api.errors import ApiError
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


def test_deep_template_variables_are_a_400(tokenizer: Tokenizer) -> None:
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    body = b'{"model":"demo","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":' + deep + b"}"
    result = outcome(parse_chat, body, tokenizer)
    assert isinstance(result, ParsedRequest) or (result.status, result.param) == (400, "messages")


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
