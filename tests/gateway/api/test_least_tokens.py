"""The lower bound of what a request asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.api.least_tokens import least_tokens
from pdserve.gateway.api.parsed_request import ModelLimits
from pdserve.gateway.api.parsing import parse_chat, parse_completion
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.generate import tokens_to_reserve

LIMITS = ModelLimits(("m",), 10_000, 10_000)
IDS = st.lists(st.integers(0, 100), min_size=1, max_size=20)
TEXT = st.text("abc ", min_size=1, max_size=20)
PROMPTS = TEXT | IDS | st.lists(TEXT, min_size=1, max_size=5) | st.lists(IDS, min_size=1, max_size=5)


@given(prompt=PROMPTS, n=st.none() | st.integers(1, 5), longest=st.none() | st.integers(1, 50))
def test_a_completion_never_reserves_less_and_of_token_ids_exactly_that(
    tokenizer: Tokenizer, prompt: Any, n: int | None, longest: int | None
) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "n": n, "max_tokens": longest}).encode()
    parsed = parse_completion(body, tokenizer, LIMITS)
    assert 0 < least_tokens(body) <= tokens_to_reserve(parsed)
    if longest is not None and '"' not in json.dumps(prompt):
        assert least_tokens(body) == tokens_to_reserve(parsed)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 30}, {"max_completion_tokens": 30, "max_tokens": 9}])
def test_nor_does_a_chat(tokenizer: Tokenizer, limit: dict[str, int]) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "n": 2, **limit}).encode()
    assert least_tokens(body) == 1 + 2 * (30 if limit else 1)
    assert least_tokens(body) <= tokens_to_reserve(parse_chat(body, tokenizer, LIMITS))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"n": "x"}', b'{"n": -1}', b'{"max_tokens": 0}', b'{"max_tokens": [1]}', b'{"n": 1e400}',
     b"\xff", b'{"attempt": 1}', b"[" * 100_000],
)  # fmt: skip
def test_a_wrong_body_is_not_for_it_to_judge(body: bytes) -> None:
    assert least_tokens(body) == 0
