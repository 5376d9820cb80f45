"""Grammars as a worker sees them: masks that let exactly the right tokens through, and nothing hangs the worker."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.engine.grammar import BAD_GRAMMAR, GRAMMAR_LOST, Failure, GrammarRefused, Grammars, Row, TokenizerSource
from pdserve.transfer.sampling_params import Grammar
from tests.system.tiny_model import SPECIAL, VOCAB_SIZE, tiny_tokens, write_tiny_tokenizer

EOS = 1
WAIT_S = 60.0
LABYRINTH = Grammar("ebnf", 'root ::= root root root | "a" | ""')  # the work grows with the cube of the text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSource:
    """One token per byte; the logits have 50 columns more than there are tokens."""
    directory = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return TokenizerSource(directory, VOCAB_SIZE + 50, frozenset([EOS]))


@pytest.fixture(scope="module")
def grammars(source: TokenizerSource) -> Iterator[Grammars]:
    grammars = Grammars(source, slow_cpu_s=0.2, compile_cpu_s=1)
    yield grammars
    grammars.close()


def settle(grammars: Grammars, key: tuple[str, int], grammar: Grammar) -> None:
    """Until the grammar is compiled. Raises GrammarRefused."""
    while not grammars.want(key, grammar):
        assert grammars.descriptor is not None
        assert select.select([grammars.descriptor], [], [], WAIT_S)[0], "no word from the grammar process"
        grammars.poll()


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist())


def after(grammars: Grammars, key: tuple[str, int], text: str, choice: int = 0) -> set[int]:
    """Which tokens may follow the text."""
    grammars.ask([Row(key, choice, tiny_tokens(text))])
    return allowed(grammars.collect(lambda: None)[key, choice])


@pytest.mark.parametrize(
    ("grammar", "text", "following"),
    [
        (Grammar("regex", "[ab]c+"), "", "ab"),
        (Grammar("regex", "[ab]c+"), "a", "c"),
        (Grammar("ebnf", 'root ::= "x" y\ny ::= "1" | "2"'), "x", "12"),
        (Grammar("json_schema", '{"type": "object", "properties": {"k": {"type": "boolean"}}}'), "{", '"}'),
        (Grammar("json_schema", '{"type": "object", "properties": {"k": {"type": "boolean"}}}'), '{"k": ', "tf"),
        (Grammar("json", ""), "", "{"),
    ],
)
def test_a_mask_lets_exactly_the_next_tokens_through(
    grammars: Grammars, grammar: Grammar, text: str, following: str
) -> None:
    key = (f"{grammar.text}{text}", 1)
    settle(grammars, key, grammar)
    assert after(grammars, key, text) == set(tiny_tokens(following))
    grammars.forget(key)


def test_eos_may_come_only_when_the_text_is_complete_and_alone_when_nothing_can_follow(grammars: Grammars) -> None:
    settle(grammars, ("eos", 1), Grammar("regex", "ab{1,2}"))
    assert EOS not in after(grammars, ("eos", 1), "a")
    assert after(grammars, ("eos", 1), "ab") == {EOS, *tiny_tokens("b")}
    assert after(grammars, ("eos", 1), "abb") == {EOS}


def test_special_tokens_and_columns_without_a_token_are_never_allowed(grammars: Grammars) -> None:
    settle(grammars, ("any", 1), Grammar("regex", "(.|\\n)+"))
    found = after(grammars, ("any", 1), "")
    assert found >= set(tiny_tokens("az<|>"))
    assert not found & set(range(len(SPECIAL)))
    assert max(found) < VOCAB_SIZE


def test_choices_of_one_attempt_are_followed_apart_and_from_any_token_on(grammars: Grammars) -> None:
    settle(grammars, ("n", 1), Grammar("regex", "ax|by"))
    assert after(grammars, ("n", 1), "a", choice=0) == set(tiny_tokens("x"))
    assert after(grammars, ("n", 1), "b", choice=1) == set(tiny_tokens("y"))
    settle(grammars, ("n", 2), Grammar("regex", "ax|by"))  # a later attempt is told all that is out
    assert after(grammars, ("n", 2), "by", choice=1) == {EOS}


def test_tokens_up_to_the_end_of_reasoning_are_free(grammars: Grammars) -> None:
    key, (end, begin) = ("why", 1), tiny_tokens("!?")
    settle(grammars, key, Grammar("regex", "ab", after=end))

    def mask(output: list[int]) -> bytes | None:
        grammars.ask([Row(key, 0, output)])
        return grammars.collect(lambda: None)[key, 0]

    assert mask([]) is None
    assert mask(tiny_tokens("zz")) is None
    assert after(grammars, key, "zz!") == set(tiny_tokens("a"))
    assert after(grammars, key, "zz!a") == set(tiny_tokens("b"))
    key = ("whether", 1)
    settle(grammars, key, Grammar("regex", "ab", after=end, opening=begin))
    assert after(grammars, key, "") == {begin, *tiny_tokens("a")}, "reasoning may begin, or the text"
    assert after(grammars, key, "a", choice=1) == set(tiny_tokens("b"))
    assert mask([begin]) is None
    assert after(grammars, key, "?zz!") == set(tiny_tokens("a"))
    assert after(grammars, key, "?zz!a") == set(tiny_tokens("b"))


def test_a_grammar_that_leads_to_a_dead_end_fails_the_attempt_there(grammars: Grammars) -> None:
    settle(grammars, ("end", 1), Grammar("ebnf", 'root ::= "ab" x\nx ::= x'))
    grammars.ask([Row(("end", 1), 0, tiny_tokens("ab"))])
    assert grammars.collect(lambda: None) == {}
    assert [(f.key, f.reason) for f in grammars.take_failures()] == [(("end", 1), BAD_GRAMMAR)]


def test_answers_to_questions_that_nobody_waited_for_are_passed_over(grammars: Grammars) -> None:
    settle(grammars, ("late", 1), Grammar("regex", "abcd"))
    grammars.ask([Row(("late", 1), 0, tiny_tokens("a"))])  # a step that was cancelled
    grammars.ask([Row(("late", 1), 0, tiny_tokens("ab"))])
    assert after(grammars, ("late", 1), "abc") == set(tiny_tokens("d"))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "parenthesis"), (Grammar("regex", r"(a)\1"), "Backreference"),
        (Grammar("ebnf", "no rules"), "EBNF"), (Grammar("ebnf", "root ::= root"), "no text matches"),
        (Grammar("json_schema", '{"type": "foo"}'), "foo"), (Grammar("json_schema", "false"), "false"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_with_the_reason(grammars: Grammars, grammar: Grammar, reason: str) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(GrammarRefused, match=reason):
            settle(grammars, ("bad", 1), grammar)


def test_a_pathological_schema_is_refused_in_bounded_time_and_holds_nobody_up(grammars: Grammars) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(200)}
    schema = {"type": "object", "minProperties": 100, "properties": properties}
    grammars.want(("slow", 1), Grammar("json_schema", json.dumps(schema)))
    settle(grammars, ("quick", 1), Grammar("regex", "quick"))  # beside it
    assert after(grammars, ("quick", 1), "qui") == set(tiny_tokens("c"))
    with pytest.raises(GrammarRefused, match="could not be compiled within"):
        settle(grammars, ("slow", 1), Grammar("json_schema", json.dumps(schema)))


def test_a_text_that_left_the_grammar_fails_its_attempt_alone(grammars: Grammars) -> None:
    settle(grammars, ("good", 1), Grammar("regex", "ab"))
    settle(grammars, ("lost", 1), Grammar("regex", "ab"))
    grammars.ask([Row(("lost", 1), 0, tiny_tokens("x")), Row(("good", 1), 0, tiny_tokens("a"))])
    assert {row: allowed(mask) for row, mask in grammars.collect(lambda: None).items()} == {
        (("good", 1), 0): set(tiny_tokens("b"))
    }
    assert [(f.key, f.reason, f.retryable) for f in grammars.take_failures()] == [(("lost", 1), BAD_GRAMMAR, False)]


def test_a_grammar_that_takes_too_long_to_follow_ends_its_own_attempt_for_good_and_others_may_come_back(
    source: TokenizerSource,
) -> None:
    grammars = Grammars(source, mask_cpu_s=0.2)
    settle(grammars, ("deep", 1), LABYRINTH)
    settle(grammars, ("other", 1), Grammar("regex", "ab"))
    pumped: list[int] = []
    grammars.ask([Row(("deep", 1), 0, tiny_tokens("a" * 800)), Row(("other", 1), 0, [])])
    assert grammars.collect(lambda: pumped.append(1)) == {}
    assert pumped, "the worker's heartbeat goes on"
    failures = {f.key[0]: (f.reason, f.retryable) for f in grammars.take_failures()}
    assert failures == {"deep": (BAD_GRAMMAR, False), "other": (GRAMMAR_LOST, True)}
    settle(grammars, ("other", 2), Grammar("regex", "ab"))  # in a new process
    assert after(grammars, ("other", 2), "a") == set(tiny_tokens("b"))
    grammars.close()


def test_a_grammar_whose_every_token_is_slow_is_given_up_without_killing_the_process(grammars: Grammars) -> None:
    settle(grammars, ("slow", 1), LABYRINTH)
    pid = grammars.pid
    failures: list[Failure] = []
    for count in range(0, 4000, 20):
        grammars.ask([Row(("slow", 1), 0, tiny_tokens("a" * count))])
        grammars.collect(lambda: None)
        if failures := grammars.take_failures():
            break
    assert [(f.reason, f.detail) for f in failures] == [(BAD_GRAMMAR, "following it takes too long")]
    assert grammars.pid == pid


def test_the_death_of_the_process_is_noticed_and_a_grammar_that_was_being_compiled_is_compiled_again(
    source: TokenizerSource,
) -> None:
    grammars = Grammars(source)
    assert not grammars.want(("a", 1), Grammar("regex", "ab"))
    assert grammars.pid is not None
    os.kill(grammars.pid, signal.SIGKILL)
    settle(grammars, ("a", 1), Grammar("regex", "ab"))
    assert after(grammars, ("a", 1), "") == set(tiny_tokens("a"))
    grammars.close()


def test_a_model_without_a_usable_tokenizer_refuses_every_grammar(tmp_path: Path) -> None:
    for source in (None, TokenizerSource(tmp_path, 10, frozenset([1]))):
        grammars = Grammars(source)
        with pytest.raises(GrammarRefused, match="grammars cannot be served"):
            settle(grammars, ("a", 1), Grammar("regex", "ab"))
        grammars.close()
