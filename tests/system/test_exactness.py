"""Greedy text of the real model equals the reference, many requests at once. The long version is tests/exact."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.exact.prompts import short_prompts
from tests.exact.reference import Case, Reference, agree, demo_tokenizer, template_ids
from tests.system.harness import System, eventually

pytestmark = pytest.mark.timeout(300, method="signal")

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    made = []
    for prompt in short_prompts():
        ids = template_ids(prompt.messages)
        made.append(Case(prompt.name, prompt.messages, ids, reference.output(ids, MAX_TOKENS)))
    assert max(len(case.prompt) for case in made) > 550
    return made


@pytest.fixture(scope="module")
def aggregated_system() -> Iterator[System]:
    with System("demo", "--chunk-tokens", 56, "--kv-blocks", 256, "--check-invariants", prefill=0) as system:
        yield system


def assert_all_at_once_equal(system: System, cases: list[Case], reference: Reference) -> None:
    def go_on(prompt: list[int], max_tokens: int) -> list[int]:
        return system.client.complete(prompt, temperature=0, max_tokens=max_tokens).token_ids

    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(
            pool.map(lambda case: system.client.chat(case.messages, temperature=0, max_tokens=MAX_TOKENS), cases)
        )
    for case, answer in zip(cases, answers, strict=True):
        assert answer.prompt_token_ids == case.prompt
        agree(case, answer.token_ids, reference, go_on, demo_tokenizer().decode)
    system.assert_idle()


def test_disaggregated_text_equals_the_reference(demo_system: System, cases: list[Case], reference: Reference) -> None:
    demo_system.assert_idle()  # and what it has counted so far is known here

    def steps() -> float:
        return demo_system.metric("pdserve_step_seconds_count", role="prefill")

    before, moved = steps(), demo_system.metric("pdserve_transfer_bytes_total")
    assert_all_at_once_equal(demo_system, cases, reference)
    eventually(lambda: demo_system.metric("pdserve_transfer_bytes_total") > moved, 5, "KV has moved")
    eventually(lambda: steps() - before > 10, 5, "the longest prompt alone takes more than ten chunks")


def test_aggregated_text_equals_the_reference(
    aggregated_system: System, cases: list[Case], reference: Reference
) -> None:
    assert_all_at_once_equal(aggregated_system, cases, reference)
    assert aggregated_system.metric("pdserve_transfer_bytes_total") == 0
    local = "pdserve_local_prefill_total"
    eventually(lambda: aggregated_system.metric(local) == len(cases), 5, "decode has computed every prompt")
