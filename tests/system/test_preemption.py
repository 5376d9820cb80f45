"""More work than the decode pool can hold: sequences are preempted, and nobody can tell from the text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.exact.reference import Case, Reference, agree
from tests.system.harness import System, eventually
from tests.system.tiny_model import random_prompt

pytestmark = pytest.mark.timeout(300, method="signal")

NUM_REQUESTS = 16
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 160
BLOCK_SIZE = 16
POOL_BLOCKS = NUM_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE // 8


@pytest.fixture(scope="module", params=["disaggregated", "aggregated"])
def small_pool_system(request: pytest.FixtureRequest, tiny: Path) -> Iterator[System]:
    disaggregated = request.param == "disaggregated"
    flags = ("--local-prefill", "never", "--prefill-block-size", 8, "--prefill-kv-blocks", 256) if disaggregated else ()
    sizes = ("--decode-block-size", BLOCK_SIZE, "--kv-blocks", POOL_BLOCKS, "--chunk-tokens", 40, "--check-invariants")
    with System(tiny, *flags, *sizes, prefill=int(disaggregated)) as system:
        yield system


def num_preemptions(system: System) -> float:
    return system.metric("pdserve_preemptions_total")


def test_requests_of_eight_times_the_pool_finish_with_the_reference_text(
    small_pool_system: System, tiny_reference: Reference
) -> None:
    cases = []
    for seed in range(NUM_REQUESTS):
        prompt = random_prompt(seed, PROMPT_TOKENS)
        expected = tiny_reference.output(prompt, OUTPUT_TOKENS, ignore_eos=True)
        cases.append(Case(f"prompt {seed}", [], prompt, expected))

    def complete(prompt: list[int], max_tokens: int = OUTPUT_TOKENS) -> list[int]:
        ask = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        return small_pool_system.client.complete(prompt, **ask).token_ids

    small_pool_system.assert_idle()  # what was counted so far is known here
    before = num_preemptions(small_pool_system)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(complete, [case.prompt for case in cases]))
    small_pool_system.assert_idle()
    eventually(lambda: num_preemptions(small_pool_system) > before, 5, "some were preempted")
    ties = [agree(case, got, tiny_reference, complete) for case, got in zip(cases, answers, strict=True)]
    assert sum(ties) <= 2


def test_sampled_text_is_the_same_alone_and_preempted(small_pool_system: System) -> None:
    prompts = [random_prompt(100 + seed, PROMPT_TOKENS) for seed in range(NUM_REQUESTS)]

    def complete(number: int) -> list[int]:
        ask = {"temperature": 0.8, "top_p": 0.95, "seed": number, "presence_penalty": 0.5, "ignore_eos": True}
        return small_pool_system.client.complete(prompts[number], max_tokens=OUTPUT_TOKENS, **ask).token_ids

    alone = [complete(number) for number in range(NUM_REQUESTS)]
    small_pool_system.assert_idle()  # what was counted so far is known here
    before = num_preemptions(small_pool_system)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        together = list(pool.map(complete, range(NUM_REQUESTS)))
    small_pool_system.assert_idle()
    eventually(lambda: num_preemptions(small_pool_system) > before, 5, "some were preempted")
    assert together == alone
