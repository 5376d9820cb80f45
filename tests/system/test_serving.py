"""What a user of a running system sees: chat, pools, what moved, choices, limits."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from tests.exact.prompts import document
from tests.exact.reference import Reference, demo_tokenizer, template_ids
from tests.system.client import Refused
from tests.system.conftest import DEMO_DECODE_BLOCK_SIZE, DEMO_POOL_TOKENS
from tests.system.harness import SETTLE_S, System, eventually

pytestmark = pytest.mark.timeout(300, method="signal")

HELLO = [{"role": "user", "content": "Hello"}]
KV_BYTES_PER_TOKEN = 46_080  # 30 layers x (K, V) x 3 heads x 64 x 4 bytes
DEMO_CONTEXT_TOKENS = 8192


def text_ids(seed: int, num_tokens: int) -> list[int]:
    """Tokens of a text that no other seed starts with."""
    ids: list[int] = demo_tokenizer()(f"{seed} {document(seed, 8 * num_tokens, (1, 0, 0, 0))}").input_ids
    return ids[:num_tokens]


def tokens_moved(system: System) -> float:
    """Tokens whose KV decode has received, by its last heartbeat."""
    return system.metric("pdserve_transfer_bytes_total") / KV_BYTES_PER_TOKEN


def assert_moved(system: System, before: float, num_tokens: int) -> None:
    """So many tokens have moved since there were `before`, and no more."""
    eventually(lambda: tokens_moved(system) - before >= num_tokens, 10, f"{num_tokens} tokens have moved")
    time.sleep(SETTLE_S)
    assert tokens_moved(system) - before == num_tokens


def test_chat_without_a_token_limit_ends_where_the_reference_ends(demo_system: System, reference: Reference) -> None:
    answer = demo_system.client.chat(HELLO, temperature=0)
    assert answer.prompt_token_ids == template_ids(HELLO)
    assert answer.token_ids == reference.output(answer.prompt_token_ids, 64)
    assert answer.finish_reason == "stop"
    assert answer.text == demo_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert answer.usage["completion_tokens"] == len(answer.token_ids)
    assert answer.usage["prompt_tokens"] == len(answer.prompt_token_ids)


def test_streamed_chat_concatenates_to_the_plain_answer(demo_system: System) -> None:
    messages = [{"role": "user", "content": "Name three rivers, each with an emoji."}]
    plain = demo_system.client.chat(messages, temperature=0, max_tokens=48)
    streamed = demo_system.client.stream("/v1/chat/completions", messages=messages, temperature=0, max_tokens=48)
    assert streamed.choices == plain.choices
    assert streamed.prompt_token_ids == plain.prompt_token_ids
    assert streamed.usage["completion_tokens"] == plain.usage["completion_tokens"] > 0


def test_stream_arrives_in_pieces_over_time(demo_system: System) -> None:
    ask = {"prompt": "One, two,", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    (decode,) = demo_system.pids("decode").values()
    with demo_system.client.events("/v1/completions", **ask) as events:
        pieces = (event["choices"][0]["token_ids"] for event in events)
        first = next(ids for ids in pieces if ids)
        os.kill(decode, signal.SIGSTOP)  # the last is not made while the first is looked at
        try:
            assert demo_system.metric("pdserve_requests_inflight") == 1
        finally:
            os.kill(decode, signal.SIGCONT)
        rest = [ids for ids in pieces if ids]
    assert len(first) + sum(map(len, rest)) == 400
    assert len(rest) > 50


def test_pools_show_both_workers_and_a_linked_pair(demo_system: System) -> None:
    assert {worker["role"] for worker in demo_system.workers()} == {"prefill", "decode"}
    (link,) = demo_system.links()
    assert link["state"] == "linked"
    assert link["link"] == "shm"
    assert link["worker"].startswith("decode-0")
    command_lines = {process.pid: " ".join(process.cmdline()) for process in demo_system.processes()}
    for role in ("prefill", "decode"):
        (pid,) = demo_system.pids(role).values()
        assert f"pdserve.{role}" in command_lines[pid]
    assert any("pdserve.gateway" in line and "pdserve.gateway.cli" not in line for line in command_lines.values())


def test_transfer_moves_exactly_the_prompt_tokens_that_decode_lacks(demo_system: System) -> None:
    prompt = text_ids(31, 150)

    def assert_moves(ids: list[int], num_tokens: int) -> None:
        before = tokens_moved(demo_system)
        answer = demo_system.client.complete(ids, max_tokens=2, temperature=0)
        assert answer.prompt_token_ids == ids
        assert_moved(demo_system, before, num_tokens)

    held = (len(prompt) - 1) // DEMO_DECODE_BLOCK_SIZE * DEMO_DECODE_BLOCK_SIZE
    assert held == 128
    demo_system.assert_idle()  # what was moved before is counted
    assert_moves(prompt, len(prompt))
    assert_moves(prompt, len(prompt) - held)
    # Parts ways with the first prompt inside its third block: two are held.
    branch = prompt[:70] + text_ids(32, 90)
    assert_moves(branch, len(branch) - 64)
    # A prompt of whole blocks that is held in full: at least one token must be computed, so one block moves.
    assert_moves(prompt[:128], 32)
    assert demo_system.metric("pdserve_local_prefill_total") == 0


def test_four_choices_move_the_bytes_of_one_and_count_the_prompt_once(demo_system: System) -> None:
    demo_system.assert_idle()  # what was moved before is counted
    for n, seed in ((1, 33), (4, 34)):
        prompt, before = text_ids(seed, 600), tokens_moved(demo_system)
        usage = demo_system.client.complete(prompt, n=n, max_tokens=2, ignore_eos=True).usage
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (600, 2 * n)
        assert_moved(demo_system, before, 600)
    demo_system.assert_idle()


def test_seeded_choices_differ_repeat_and_leave_no_block(demo_system: System) -> None:
    ask = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 16}
    prompt = text_ids(41, 60)
    first, second = (demo_system.client.complete(prompt, **ask) for _ in range(2))
    assert [len(choice.token_ids) for choice in first.choices] == [len(choice.token_ids) for choice in second.choices]
    for one, other in itertools.combinations(first.choices, 2):
        assert one.token_ids != other.token_ids
    assert first.choices == second.choices
    assert first.usage["prompt_tokens"] == len(prompt)
    assert first.usage["completion_tokens"] == sum(len(choice.token_ids) for choice in first.choices)
    demo_system.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [DEMO_POOL_TOKENS, DEMO_CONTEXT_TOKENS])
def test_prompt_beyond_a_limit_is_refused_naming_it(demo_system: System, limit: int, stream: bool) -> None:
    prompt = text_ids(51, 100) * (limit // 100 + 1)
    response = demo_system.client.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "stream": stream})
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json"), "no byte of a stream was sent"
    assert str(limit) in response.json()["error"]["message"].replace(",", "")


def test_unknown_model_is_not_found(demo_system: System) -> None:
    with pytest.raises(Refused) as refused:
        demo_system.client.complete("x", model="someone-elses")
    assert refused.value.status == 404
    assert "someone-elses" in refused.value.message


def test_metrics_label_what_the_workers_report(demo_system: System) -> None:
    for role in ("prefill", "decode"):
        blocks = {"worker": f"{role}-0", "role": role}
        assert sum(demo_system.metric("pdserve_kv_blocks", state=state, **blocks) for state in ("free", "cached")) > 0
    total = demo_system.metric("pdserve_kv_blocks", role="decode")  # free, cached and held
    assert total == DEMO_POOL_TOKENS / DEMO_DECODE_BLOCK_SIZE
    assert demo_system.metric("pdserve_ttft_seconds_count") > 0
