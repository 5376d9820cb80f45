"""Reasoning told apart from the answer, wherever the text is cut, and counted by the token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.api.chat_output import Calling, ChatOutput, Message, OutputFormat
from pdserve.gateway.api.reasoning import Opened, ReasoningSplitter, opened_by_prompt

CALL = '<tool_call>{"name": "f"}</tool_call>'


def split(opened: Opened, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    parts = [splitter.feed(piece, final=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES: list[tuple[Opened, str, tuple[str, str]]] = [
    ("maybe", "<think>\nwhy\n\nnot\n</think>\n\nyes \n", ("why\n\nnot", "yes \n")),
    ("maybe", " \n<think>why</think>yes", ("why", "yes")),
    ("maybe", "<think></think>yes", ("", "yes")),
    ("maybe", "\n yes", ("", "\n yes")),
    ("maybe", "yes <think>no</think>", ("", "yes <think>no</think>")),
    ("maybe", "<thin", ("", "<thin")),
    ("maybe", "", ("", "")),
    ("yes", "\nwhy</think>yes", ("why", "yes")),
    ("yes", "<b> </thin </think> </think> yes", ("<b> </thin", "</think> yes")),
    ("yes", "why \n</think", ("why \n</think", "")),
    ("yes", " 你 \n好 ", ("你 \n好 ", "")),
    ("no", "<think>a</think>", ("", "<think>a</think>")),
]


@pytest.mark.parametrize(("opened", "text", "parts"), CASES)
def test_reasoning_and_answer_are_told_apart_wherever_the_text_is_cut(
    opened: Opened, text: str, parts: tuple[str, str]
) -> None:
    assert split(opened, [text]) == parts
    assert split(opened, [*text, ""]) == parts
    for cut in range(len(text)):
        assert split(opened, [text[:cut], text[cut:]]) == parts


@pytest.mark.parametrize(
    ("prompt", "continued", "opened"),
    [
        ("<|assistant|>", False, "maybe"),
        ("<|assistant|><think>\n", False, "yes"),
        ("<|assistant|><think>\n\n</think>\n\n", False, "no"),
        ("<|user|>what is <think>?<|assistant|>", False, "maybe"),
        ("<|assistant|><think>well", True, "yes"),
        ("<|assistant|><think>well</think>so", True, "no"),
        ("<|assistant|>so", True, "no"),
    ],
)
def test_the_end_of_the_prompt_says_whether_reasoning_is_open(prompt: str, continued: bool, opened: Opened) -> None:
    assert opened_by_prompt(prompt, continued=continued) == opened


@pytest.mark.parametrize(
    ("opened", "tokens", "count"),
    [
        ("maybe", ["<think>", "a", "b", "</think>", "c"], 4),
        ("maybe", ["<th", "ink>", "a", "</", "thi", "nk>", "c"], 6),
        ("maybe", ["<think>a</think>c", "d"], 1),
        ("maybe", ["c", "<think>"], 0),
        ("yes", ["a", "", "b</think>", "", "c"], 3),
        ("yes", ["a", "b", ""], 3),
        ("no", ["a", "b"], 0),
    ],
)
def test_reasoning_is_counted_to_the_token(opened: Opened, tokens: list[str], count: int) -> None:
    output, length = ChatOutput(OutputFormat(reasoning=opened)), 0
    for number, token in enumerate(tokens):
        length += len(token)
        output.feed(token, token_end=length, final=number == len(tokens) - 1)
    assert output.reasoning_tokens == count


def test_text_that_is_held_back_is_counted_with_its_own_token() -> None:
    """As when the beginning of a stop string delays the closing marker."""
    output = ChatOutput(OutputFormat(reasoning="yes"))
    output.feed("a", token_end=1, final=False)
    output.feed("", token_end=9, final=False)
    output.feed("", token_end=12, final=False)
    output.feed("</think>xyz.", token_end=13, final=True)
    assert output.reasoning_tokens == 2


SCRAPS = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "why", CALL, CALL[:20], CALL[20:], "<th", "ink>", "so", "你"]
)


@given(
    scraps=st.lists(SCRAPS, max_size=8),
    opened=st.sampled_from(["no", "maybe", "yes"]),
    cuts=st.lists(st.integers(1, 9)),
)
def test_cuts_change_neither_reasoning_nor_content_nor_calls(
    scraps: list[str], opened: Opened, cuts: list[int]
) -> None:
    text = "".join(scraps)
    assert message(opened, [text]) == message(opened, [*text, ""])
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    assert message(opened, [text]) == message(opened, [*pieces, text[at:]])


def message(opened: Opened, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    output, whole, length = ChatOutput(OutputFormat(Calling("auto", ("f",)), opened)), Message(), 0
    for number, piece in enumerate(pieces):
        length += len(piece)
        whole.add(output.feed(piece, token_end=length, final=number == len(pieces) - 1))
    return whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.calls]


def test_calls_are_read_behind_the_reasoning_only() -> None:
    output = ChatOutput(OutputFormat(Calling("auto", ("f",)), "maybe"))
    text = f"<think>{CALL}</think>\n\n{CALL}"
    delta = output.feed(text, token_end=len(text), final=True)
    assert (delta.content, delta.reasoning) == ("", CALL)
    assert [(part.index, part.name, part.arguments) for part in delta.calls] == [(0, "f", ""), (0, "", "{}")]
    assert output.finish_reason("stop") == "tool_calls"
    assert output.finish_reason("length") == "length"
