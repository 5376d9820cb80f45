"""Grammars through real workers: what prefill samples and what decode goes on with is one text that matches."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.grammar import TokenizerSource
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.setup import Engine
from pdserve.transfer.messages import Cancel, Failed, FirstTokens, Reserved, Tokens
from pdserve.transfer.sampling_params import Grammar, SamplingParams
from tests.engine.tiny_models import load
from tests.system.tiny_model import SPECIAL, load_tiny_llama, random_prompt, write_tiny_llama
from tests.worker_rig import WAIT_S, Rig, prefill_message, reserve_message

EOS = 1
FIRST_BYTE_TOKEN = len(SPECIAL)
PATTERN = "[a-f]{12}-[0-9]{6}(xyz)?"
REGEX = Grammar("regex", PATTERN)
STARTED_S = 60.0  # the first grammar starts a process


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=7)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Rig]:
    """One for all tests, since every worker's first grammar starts a process."""
    rig = Rig(tmp_path_factory.mktemp("rig"))

    def engine(num_blocks: int, block_size: int) -> Engine:
        model = load(load_tiny_llama(model_path))
        source = TokenizerSource(model_path, model.vocab_size, model.eos_token_ids)
        cache = KVCache(model.layout, num_blocks, block_size)
        return Engine(model, cache, BlockPool(num_blocks, block_size), source)

    rig.engine = engine
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def pair(rig: Rig) -> tuple[str, str]:
    return rig.pair(num_blocks=200)


def params(seed: int = 5, max_tokens: int = 40, grammar: Grammar | None = REGEX, **change: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, grammar=grammar, **change)


def start(rig: Rig, name: str, decode: str, prefill: str = "", **change: object) -> None:
    prompt = change.pop("prompt", random_prompt(1, 20))
    assert isinstance(prompt, list)
    message = reserve_message(name, prompt, prefill, **{"params": params(), **change})
    rig.first_index[name, message.attempt] = len(message.outputs[0])
    rig.live.add((name, message.attempt))
    rig.send(decode, message)
    if prefill:
        reserved = rig.wait_for(Reserved, name, message.attempt, STARTED_S)
        assert isinstance(reserved, Reserved)
        rig.send(prefill, prefill_message(message, reserved, decode))


def finish(rig: Rig, *names: str, attempt: int = 1, choices: int = 1) -> None:
    rig.until(lambda: all(len(rig.finished(n, attempt)) == choices for n in names), "all have finished", STARTED_S)


def text(tokens: list[int]) -> str:
    """The alphabet of a byte-level tokenizer is sorted: the printable ASCII comes first."""
    assert EOS not in tokens
    return "".join(chr(ord("!") + token - FIRST_BYTE_TOKEN) for token in tokens)


def finishes(rig: Rig, name: str) -> set[str]:
    items = [item for _, m in rig.received if isinstance(m, Tokens) for item in m.items]
    return {item[5] for item in items if item[0] == name and item[5]}


def assert_matches(rig: Rig, name: str) -> None:
    for tokens in rig.tokens(name).values():
        assert tokens[-1] == EOS
        assert re.fullmatch(PATTERN, text(tokens[:-1]))
    assert finishes(rig, name) == {"stop"}


def test_every_choice_matches_through_both_workers_and_equals_what_one_worker_says(
    rig: Rig, pair: tuple[str, str]
) -> None:
    prefill, decode = pair
    start(rig, "a", decode, prefill, n=3)
    finish(rig, "a", choices=3)
    assert_matches(rig, "a")
    assert len({tuple(tokens) for tokens in rig.tokens("a").values()}) == 3
    first = rig.wait_for(FirstTokens, "a")
    assert isinstance(first, FirstTokens)
    assert first.tokens == [rig.tokens("a")[choice][0] for choice in range(3)]
    start(rig, "alone", decode, n=3)
    finish(rig, "alone", choices=3)
    assert rig.tokens("alone") == rig.tokens("a")


@pytest.mark.parametrize("opened", [True, False])
def test_what_follows_the_reasoning_matches_through_both_workers(rig: Rig, pair: tuple[str, str], opened: bool) -> None:
    begin, end = FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 1
    prefill, decode = pair
    grammar = Grammar("regex", PATTERN, after=end, opening=None if opened else begin)
    wanted = params(grammar=grammar, logit_bias={begin: 90.0, end: 90.0})
    start(rig, f"why-{opened}", decode, prefill, params=wanted, n=4)
    finish(rig, f"why-{opened}", choices=4)
    for tokens in rig.tokens(f"why-{opened}").values():
        assert set(tokens[: tokens.index(end)]) <= {begin}, "the bias leaves no other"
        assert opened or tokens[0] == begin, "the one token that is biased and allowed"
        assert re.fullmatch(PATTERN, text(tokens[tokens.index(end) + 1 : -1]))
        assert tokens[-1] == EOS


@pytest.mark.parametrize(("preemption", "swap_bytes"), [("recompute", 0), ("swap", 1 << 22)])
def test_preemption_does_not_change_a_token(rig: Rig, pair: tuple[str, str], preemption: str, swap_bytes: int) -> None:
    _, calm = pair
    tight = rig.start_decode(num_blocks=23, preemption=preemption, swap_bytes=swap_bytes)
    for i in range(4):
        for name, worker in (("calm", calm), ("tight", tight)):
            start(rig, f"{name}-{preemption}{i}", worker, params=params(seed=i), prompt=random_prompt(i, 20))
    finish(rig, *(f"{name}-{preemption}{i}" for i in range(4) for name in ("calm", "tight")))
    for i in range(4):
        assert_matches(rig, f"tight-{preemption}{i}")
        assert rig.tokens(f"tight-{preemption}{i}") == rig.tokens(f"calm-{preemption}{i}")
    assert rig.metric(tight, "pdserve_preemptions_total") > 0


def test_text_that_is_not_complete_in_time_ends_by_length(rig: Rig, pair: tuple[str, str]) -> None:
    start(rig, "short", pair[1], params=params(max_tokens=5))
    finish(rig, "short")
    assert re.fullmatch("[a-f]{5}", text(rig.tokens("short")[0]))
    assert finishes(rig, "short") == {"length"}


def test_who_asks_for_more_tokens_gets_the_longest_text_and_never_more(rig: Rig, pair: tuple[str, str]) -> None:
    _, decode = pair
    start(rig, "least", decode, params=params(min_tokens=30))
    start(rig, "ignore", decode, params=params(ignore_eos=True))
    finish(rig, "least", "ignore")
    for name in ("least", "ignore"):
        assert_matches(rig, name)
        assert text(rig.tokens(name)[0][:-1]).endswith("xyz")


def test_bias_and_penalties_choose_among_what_the_grammar_allows(rig: Rig, pair: tuple[str, str]) -> None:
    _, decode = pair
    bias = {FIRST_BYTE_TOKEN + ord(letter) - ord("!"): value for letter, value in (("Z", 100.0), ("c", 50.0))}
    start(rig, "biased", decode, params=params(logit_bias=bias, temperature=0.0))
    start(rig, "penalised", decode, params=params(frequency_penalty=1e4, repetition_penalty=1.5))
    finish(rig, "biased", "penalised")
    assert_matches(rig, "biased")
    assert text(rig.tokens("biased")[0][:12]) == "c" * 12
    assert_matches(rig, "penalised")
    letters = text(rig.tokens("penalised")[0][:12])
    assert sorted(letters) == sorted("abcdef" * 2)  # none may come a third time before all have come twice


@pytest.mark.parametrize("disaggregated", [True, False])
def test_what_is_no_grammar_fails_for_good_and_holds_nothing(
    rig: Rig, pair: tuple[str, str], disaggregated: bool
) -> None:
    name, (prefill, decode) = f"bad{disaggregated}", pair
    grammar = Grammar("regex", "(a")
    rig.live.add((name, 1))
    prompt = random_prompt(1, 20)
    rig.send(decode, reserve_message(name, prompt, prefill if disaggregated else "", params=params(grammar=grammar)))
    failed = rig.wait_for(Failed, name, timeout_s=STARTED_S)
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retryable) == ("bad_grammar", False)
    assert "parenthesis" in failed.detail
    rig.until(lambda: rig.held(decode) == 0, "nothing is held")


def test_a_request_cancelled_while_its_grammar_is_compiled_is_forgotten(rig: Rig, pair: tuple[str, str]) -> None:
    _, decode = pair
    properties = {f"p{i}": {"type": "integer"} for i in range(200)}
    schema = {"type": "object", "minProperties": 100, "properties": properties}  # takes all the time it is given
    slow = Grammar("json_schema", json.dumps(schema))
    rig.live.add(("cancelled", 1))
    rig.send(decode, reserve_message("cancelled", random_prompt(1, 20), params=params(grammar=slow)))
    rig.until(lambda: ("cancelled", 1) in rig.heartbeats[decode].live, "it waits there", WAIT_S)
    rig.live.clear()
    rig.send(decode, Cancel("cancelled", 1))
    rig.until(lambda: not rig.heartbeats[decode].live, "it is dropped", WAIT_S)
    start(rig, "next", decode)
    finish(rig, "next")
    assert not [m for _, m in rig.received if isinstance(m, Failed | Reserved) and m.request == "cancelled"]


def test_an_attempt_that_lost_its_automaton_goes_on_with_the_same_text_in_the_next(
    rig: Rig, pair: tuple[str, str]
) -> None:
    prefill, decode = pair
    long = params(max_tokens=210, grammar=Grammar("regex", "[a-f]{200}"))
    start(rig, "whole", decode, prefill, params=long)
    finish(rig, "whole")
    worker, _ = rig.workers[0]
    start(rig, "broken", decode, prefill, params=long)
    rig.until(lambda: len(rig.tokens("broken").get(0, [])) > 5, "it is at it")
    pid = worker._grammars.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    failed = rig.wait_for(Failed, "broken", timeout_s=STARTED_S)
    assert isinstance(failed, Failed)
    assert failed.reason in ("grammar_lost", "grammar_died")  # between two steps, or in one
    assert failed.retryable
    rig.live.discard(("broken", 1))
    got = rig.tokens("broken")[0]
    assert 5 < len(got) < 200
    start(rig, "broken", decode, prefill, params=long, attempt=2, outputs=[got])
    finish(rig, "broken", attempt=2)
    assert got + rig.tokens("broken", 2)[0] == rig.tokens("whole")[0]
