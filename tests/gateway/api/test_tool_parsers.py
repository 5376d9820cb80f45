"""Calls out of text: every format, broken ones, and pieces cut anywhere."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.api.tool_parsers import (
    FORCED,
    FORMATS,
    CallFormat,
    NamedCall,
    ToolCallParser,
    ToolParserName,
    format_of_template,
)

Answer = tuple[str, list[tuple[str, str]]]
HERMES, LLAMA, MISTRAL = FORMATS["hermes"], FORMATS["llama3_json"], FORMATS["mistral"]
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "parameters": {"b": "x\\n"}}'
MARKED = '{"name": "f", "arguments": {"a": "</tool_call>"}}'
UNKNOWN = '{"name": "rm", "arguments": {"a": 1}}'
ARGUMENTS_F, ARGUMENTS_G = ("f", '{"a": 1}'), ("g", '{"b": "x\\n"}')


def parse(form: CallFormat, pieces: list[str], *, single: bool = False) -> Answer:
    parser = ToolCallParser(form, ("f", "g"), single=single)
    content, calls = "", []
    for number, piece in enumerate(pieces):
        said, deltas = parser.feed(piece, final=number == len(pieces) - 1)
        content += said
        for delta in deltas:
            if delta.name:
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1, "calls come one after the other"
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    return content, calls


CASES: list[tuple[CallFormat, str, Answer]] = [
    (HERMES, "  just text \n", ("  just text \n", [])),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", ("", [ARGUMENTS_F])),
    (HERMES, f"Hm.\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n", ("Hm.", [ARGUMENTS_F, ARGUMENTS_G])),
    (HERMES, f"<tool_call>{F}</tool_call> done", (" done", [ARGUMENTS_F])),
    (HERMES, f"<tool_call>{F}", ("", [ARGUMENTS_F])),
    (HERMES, f"<tool_call>{F[:-1]}</tool_call>", ("", [ARGUMENTS_F])),
    (HERMES, f"<tool_call>{F}}}\n</tool_call>", ("", [ARGUMENTS_F])),
    (HERMES, f"<tool_call>{F} and so on</tool_call>", (" and so on</tool_call>", [ARGUMENTS_F])),
    (HERMES, f"<tool_call>{MARKED}</tool_call>", ("", [("f", '{"a": "</tool_call>"}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call>.', (".", [("f", '{"a": 1 oops}}')])),
    (HERMES, '<tool_call>{"name": "f", "arg', ('<tool_call>{"name": "f", "arg', [])),
    (HERMES, "<tool_call>", ("<tool_call>", [])),
    (HERMES, "a <tool_c", ("a <tool_c", [])),
    (HERMES, "<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", [])),
    (HERMES, f"<tool_call>oops <tool_call>{F}</tool_call>", ("<tool_call>oops", [ARGUMENTS_F])),
    (HERMES, f"<tool_call><tool_call>{F}</tool_call>", ("<tool_call>", [ARGUMENTS_F])),
    (HERMES, f"<tool_call>{UNKNOWN}</tool_call>", (f"<tool_call>{UNKNOWN}</tool_call>", [])),
    (LLAMA, G, ("", [ARGUMENTS_G])),
    (LLAMA, f" \n{G}; {F}", ("", [ARGUMENTS_G, ARGUMENTS_F])),
    (LLAMA, f"<|python_tag|>{G}", ("", [ARGUMENTS_G])),
    (LLAMA, f"\n<|python_tag|> {G};{F}", ("", [ARGUMENTS_G, ARGUMENTS_F])),
    (LLAMA, f"Well: <|python_tag|>{G}", ("Well:", [ARGUMENTS_G])),
    (LLAMA, f"Well: {G}", (f"Well: {G}", [])),
    (LLAMA, '{"a": 1} is JSON', ('{"a": 1} is JSON', [])),
    (LLAMA, " {", (" {", [])),
    (LLAMA, "", ("", [])),
    (LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (MISTRAL, f"[TOOL_CALLS][{F}, {G}]", ("", [ARGUMENTS_F, ARGUMENTS_G])),
    (MISTRAL, f"[TOOL_CALLS] [ {F} ]\n", ("", [ARGUMENTS_F])),
    (MISTRAL, f"Hm. [TOOL_CALLS]{F}", ("Hm.", [ARGUMENTS_F])),
    (MISTRAL, f"[TOOL_CALLS][{F}, oops]", (", oops]", [ARGUMENTS_F])),
    (MISTRAL, f"[TOOL_CALLS][{F}", ("", [ARGUMENTS_F])),
    (MISTRAL, "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
    (MISTRAL, f"[{F}]", (f"[{F}]", [])),
    (FORCED, f"[{F},\n{G}]", ("", [ARGUMENTS_F, ARGUMENTS_G])),
    (FORCED, F, ("", [ARGUMENTS_F])),
    (FORCED, '[{"name": "f", "parameters": {"a": 1', ("", [("f", '{"a": 1')])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "answer"), CASES)
def test_content_and_calls_are_told_apart(form: CallFormat, text: str, answer: Answer) -> None:
    assert parse(form, [text]) == answer


@pytest.mark.parametrize(("form", "text", "answer"), CASES)
def test_pieces_cut_anywhere_add_up_to_the_same(form: CallFormat, text: str, answer: Answer) -> None:
    assert parse(form, [*text, ""]) == answer, "one character at a time"
    for cut in range(len(text)):
        assert parse(form, [text[:cut], text[cut:]]) == answer


SCRAPS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", ",", ";", "{", "}", " ", "\n", F, G,
     '{"name": "f", "arguments": ', '"name"', '{"a": ', '"', "text", "你", F[:-1], F[:-2], "<tool", "[TOOL_"]
)  # fmt: skip


@given(scraps=st.lists(SCRAPS, max_size=10), form=st.sampled_from([*FORMATS.values(), FORCED]), seed=st.integers(0, 99))
def test_cuts_never_matter_and_nothing_but_markup_is_lost(scraps: list[str], form: CallFormat, seed: int) -> None:
    text, rng = "".join(scraps), random.Random(seed)
    cuts = sorted(rng.choices(range(len(text) + 1), k=5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = parse(form, [text])
    assert parse(form, pieces) == (content, calls)
    if not calls:
        assert content == text
    assert text.count("text") == content.count("text") + sum(arguments.count("text") for _, arguments in calls)


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ToolCallParser(HERMES, ("f",))
    parser.feed('<tool_call>{"name": "f", "arguments": {"code": "')
    assert [delta.arguments for _, deltas in map(parser.feed, ["pri", "nt", "()"]) for delta in deltas] == [
        "pri", "nt", "()",
    ]  # fmt: skip


def test_where_one_call_is_allowed_the_answer_is_over_with_it() -> None:
    parser = ToolCallParser(HERMES, ("f", "g"), single=True)
    _, deltas = parser.feed(f"<tool_call>{F[:-1]}")
    assert not parser.over
    parser.feed("}" + f"</tool_call><tool_call>{G}</tool_call> more")
    assert parser.over
    assert parser.num_calls == 1
    assert parser.feed("and more", final=True) == ("", [])
    assert "".join(delta.arguments for delta in deltas) == '{"a": 1}'


def test_a_named_calls_arguments_are_the_whole_answer() -> None:
    call = NamedCall("f")
    deltas = [delta for piece in ['{"a"', ": 1}", ""] for delta in call.feed(piece)[1]]
    assert [(delta.name, delta.arguments) for delta in deltas] == [("f", ""), ("", '{"a"'), ("", ": 1}")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|> <|python_tag|>", "llama3_json"),
        ('<|start_header_id|> {"name": x, "parameters": y}', "llama3_json"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_format_is_the_one_that_the_template_shows(template: str, name: ToolParserName) -> None:
    assert format_of_template(template) == name


@given(arguments=st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_any_arguments_come_out_as_they_went_in(arguments: dict[str, Any]) -> None:
    text = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    content, [(name, read)] = parse(HERMES, [f"<tool_call>{text}</tool_call>"])
    assert (content, name, json.loads(read)) == ("", "f", arguments)
