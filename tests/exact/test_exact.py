"""Every way of running the real model gives the reference's tokens: pools, links, caches, block sizes, preemption."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.exact.conftest import MAX_TOKENS, Row
from tests.exact.reference import Case, Reference, agree, demo_tokenizer
from tests.system.harness import System

pytestmark = pytest.mark.timeout(2400, method="signal")

AT_ONCE = 16
KV_BYTES_PER_TOKEN = 46_080
# Not a multiple of either block size: chunks begin and end inside blocks.
CHUNK_TOKENS = 56
REPEATED = 20
ONE_BY_ONE = 10
CROWD = 48
SMALL_BLOCK_SIZE = 8  # a sequence needs one more block every 8 tokens, and few have one to spare
SMALL_POOL_BLOCKS = 96
NEVER = ("--local-prefill", "never")
PATIENT = ("--queue-timeout-s", 900)
BLOCKS_16_32 = ("--prefill-block-size", 16, "--decode-block-size", 32)


@dataclass(frozen=True)
class Configuration:
    """One system and what must be seen to have happened in it."""

    name: str
    flags: tuple[object, ...]
    prefill: int = 1
    decode: int = 1
    prefill_pool: tuple[object, ...] = ("--prefill-kv-blocks", 2048)
    decode_pool: tuple[object, ...] = ("--kv-blocks", 1024)
    moves_everything: bool = False  # nothing is cached and nothing computed by decode: the bytes are known exactly
    moves: bool = True
    preempts: bool = False
    repeat: int = 0  # so many prompts once more, which finds their blocks cached
    one_by_one: int = 0  # so many prompts before the crowd
    at_once: int = AT_ONCE
    longest: int = 1 << 30  # prompts with more tokens do not fit

    def start(self) -> System:
        pools = (*(self.prefill_pool if self.prefill else ()), *self.decode_pool)
        flags = ("--chunk-tokens", CHUNK_TOKENS, *self.flags, *pools)
        return System("demo", *flags, prefill=self.prefill, decode=self.decode)


CONFIGURATIONS = (
    Configuration("1P1D never, blocks 16/32, prefix caching", (*NEVER, *BLOCKS_16_32), repeat=REPEATED),
    Configuration(
        "2P2D never, blocks 16/32, no caching",
        (*NEVER, *BLOCKS_16_32, "--no-prefix-caching"),
        prefill=2,
        decode=2,
        moves_everything=True,
    ),
    Configuration("1P1D auto, blocks 32/16", ("--prefill-block-size", 32), one_by_one=ONE_BY_ONE),
    Configuration("aggregated, blocks 16", (), prefill=0, moves=False),
    *(
        Configuration(
            # Aggregated: with prefill workers, reservations that wait for KV make room before anybody is preempted.
            f"aggregated, chat only, pool of 768 tokens, no caching, {preemption}",
            ("--block-size", SMALL_BLOCK_SIZE, "--no-prefix-caching", "--preemption", preemption, *PATIENT),
            prefill=0,
            moves=False,
            decode_pool=("--kv-blocks", SMALL_POOL_BLOCKS),
            preempts=True,
            at_once=CROWD,
            longest=SMALL_POOL_BLOCKS * SMALL_BLOCK_SIZE - MAX_TOKENS,
        )
        for preemption in ("recompute", "swap")
    ),
)


def run(system: System, cases: Sequence[Case], at_once: int) -> list[list[int]]:
    """Output tokens of every case, `at_once` requests at a time."""

    def ask(case: Case) -> list[int]:
        answer = system.client.chat(case.messages, temperature=0, max_tokens=MAX_TOKENS)
        assert answer.prompt_token_ids == case.prompt, f"{case.name}: the chat template gave other tokens"
        assert answer.usage["completion_tokens"] == len(answer.token_ids)
        return answer.token_ids

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, cases))


def count_ties(system: System, cases: Sequence[Case], outputs: Sequence[list[int]], reference: Reference) -> list[int]:
    """Ties per case. Raises AssertionError that lists every case whose tokens are wrong."""

    def go_on(prompt: list[int], max_tokens: int) -> list[int]:
        return system.client.complete(prompt, temperature=0, max_tokens=max_tokens).token_ids

    ties, wrong = [], []
    for case, output in zip(cases, outputs, strict=True):
        try:
            ties.append(agree(case, output, reference, go_on, demo_tokenizer().decode))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(cases)} prompts differ\n" + "\n".join(wrong)
    return ties


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_tokens_equal_the_reference(
    configuration: Configuration, cases: list[Case], reference: Reference, rows: list[Row]
) -> None:
    cases = [case for case in cases if len(case.prompt) <= configuration.longest]
    with configuration.start() as system:
        started = time.monotonic()
        outputs = run(system, cases[: configuration.one_by_one], 1)
        outputs += run(system, cases[configuration.one_by_one :], configuration.at_once)
        system.assert_idle(1.0)
        cached = system.metric("pdserve_prefix_cached_tokens_total", role="decode")
        asked = [*cases, *cases[: configuration.repeat]]
        outputs += run(system, asked[len(cases) :], AT_ONCE)
        seconds = time.monotonic() - started
        system.assert_idle(1.0)
        cached_later = system.metric("pdserve_prefix_cached_tokens_total", role="decode")
        moved = int(system.metric("pdserve_transfer_bytes_total"))
        chunks = int(system.metric("pdserve_step_seconds_count", role="prefill"))
        computed = system.metric("pdserve_computed_tokens_total", role="prefill")
        preemptions = int(system.metric("pdserve_preemptions_total"))
        ties = count_ties(system, asked, outputs, reference)

    row = Row(
        configuration.name,
        prompts=len(asked),
        tokens=sum(map(len, outputs)),
        exact=ties.count(0),
        ties=sum(ties),
        bytes_moved=moved,
        chunks=chunks,
        preemptions=preemptions,
        seconds=seconds,
    )
    rows.append(row)
    assert (cached_later > cached) == (configuration.repeat > 0), "only prompts that come again are found cached"
    if configuration.prefill:
        assert chunks >= computed / CHUNK_TOKENS, "a step takes one chunk at most"
    check_what_happened(configuration, row, prompt_tokens=sum(len(case.prompt) for case in cases))


def check_what_happened(configuration: Configuration, row: Row, prompt_tokens: int) -> None:
    """The run must have gone the way that its configuration is there to test."""
    assert (row.bytes_moved > 0) == configuration.moves
    if configuration.moves_everything:
        assert row.bytes_moved == prompt_tokens * KV_BYTES_PER_TOKEN
    if NEVER[0] in configuration.flags:
        assert row.chunks > 2 * row.prompts
    assert (row.preemptions > 0) == configuration.preempts
    assert row.ties <= row.prompts // 20, "ties are rare; so many mean that something is slightly wrong"
