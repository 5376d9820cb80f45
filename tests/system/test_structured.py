"""Structured output with the demo model: what comes is what was asked for, and what cannot be is a 400 with a field."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.schemas import random_schema
from tests.system.client import Answer
from tests.system.harness import System

pytestmark = pytest.mark.timeout(300, method="signal")

ASK = [{"role": "user", "content": "Tell me about a city you know."}]
SEEDS = range(6)
MAX_TOKENS = 160
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "large"]},
        "people": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["name", "size", "people"],
    "additionalProperties": False,
}
CITY_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def outcome(system: System, seed: int) -> str:
    """ "stop" for an answer that validates, "length" for one that was cut, "refused"."""
    schema = random_schema(seed)
    ask = {"messages": ASK, "guided_json": schema, "seed": seed, "max_tokens": MAX_TOKENS, "temperature": 0.7}
    response = system.client.post("/v1/chat/completions", ask)
    if response.status_code == 400:
        return "refused"
    (choice,) = response.json()["choices"]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    return str(choice["finish_reason"])


def test_an_answer_that_finishes_validates_against_its_schema(demo_system: System) -> None:
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda seed: outcome(demo_system, seed), SEEDS))
    assert outcomes.count("stop") >= 0.6 * len(SEEDS), outcomes
    assert outcomes.count("refused") <= 0.1 * len(SEEDS), outcomes
    demo_system.assert_idle()


def whole(system: System, **fields: Any) -> Answer:
    return system.client.chat(ASK, **fields)


def streamed(system: System, **fields: Any) -> Answer:
    return system.client.stream("/v1/chat/completions", messages=ASK, **fields)


@pytest.mark.parametrize("ask", [whole, streamed])
def test_every_choice_of_a_response_format_validates_streamed_or_not(demo_system: System, ask: Any) -> None:
    answer = ask(demo_system, response_format=CITY_FORMAT, n=3, seed=1, max_tokens=80)
    assert len({choice.text for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), CITY)


def test_expressions_choices_and_grammars_match(demo_system: System) -> None:
    def text(**fields: Any) -> str:
        answer = demo_system.client.complete("The answer is", max_tokens=40, **fields)
        assert answer.finish_reason == "stop"
        return answer.text

    assert re.fullmatch(r"[A-Z]{3}-\d{4}", text(guided_regex=r"[A-Z]{3}-\d{4}"))
    choices = ["Zürich", 'a "quoted"\nline', "北京", "<|im_start|>"]
    for number, choice in enumerate(choices):
        assert text(guided_choice=[choice]) == choice
        assert text(guided_choice=choices, seed=number) in choices
    grammar = 'root ::= term (" + " term)? " = " [0-9]\nterm ::= [0-9] | "(" term ")"'
    assert re.fullmatch(r"\(*\d\)*( \+ \(*\d\)*)? = \d", text(structured_outputs={"grammar": grammar}, seed=3))
    assert isinstance(json.loads(text(structured_outputs={"json_object": True}, logit_bias={}, seed=4)), dict)


def test_a_stop_string_cuts_and_an_end_is_an_end_whatever_else_is_asked(demo_system: System) -> None:
    cut = demo_system.client.complete("x", guided_choice=["one two three"], stop=" two", max_tokens=40)
    assert (cut.text, cut.finish_reason) == ("one", "stop")
    end = demo_system.client.complete("x", guided_choice=["one"], ignore_eos=True, min_tokens=30, max_tokens=40)
    assert (end.text, end.finish_reason) == ("one", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "parenthesis"),
        ({"guided_grammar": "root ::= root"}, "guided_grammar", "no text matches"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "fish"}}}},
            "response_format.json_schema.schema",
            "type must be one of",
        ),
    ],
)
def test_what_cannot_be_compiled_is_a_400_with_field_and_reason_also_for_a_stream(
    demo_system: System, fields: dict[str, Any], param: str, reason: str, stream: bool
) -> None:
    response = demo_system.client.post("/v1/chat/completions", {"messages": ASK, "stream": stream, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "bad_grammar")
    assert reason in error["message"]
    demo_system.assert_idle()


def test_log_probabilities_are_those_of_the_raw_logits(demo_system: System) -> None:
    """The grammar bars the likeliest tokens, and they are named beside the one that came all the same."""
    body = {"prompt": "The capital of France is", "guided_choice": ["qqq"], "logprobs": 2, "max_tokens": 5}
    choice = demo_system.client.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "qqq"
    first = choice["logprobs"]["top_logprobs"][0]
    assert len(first) == 3
    assert choice["logprobs"]["token_logprobs"][0] == min(first.values()) < -5
