"""The prefill scheduler: order, budget, shared prefixes, slow peers. Blocks balance in every state."""

from dataclasses import dataclass

import pytest

from pdserve.engine.block_pool import BlockPool, root_key
from pdserve.prefill.prompt import State, Work
from pdserve.prefill.scheduler import PrefillLimits, Scheduler
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.messages import (
    Prefill,
)
from pdserve.transfer.sampling_params import SamplingParams
from pdserve.transfer.sender import Outgoing

DECODE = "decode-0#00000000"
LAYER = LayerShape(kv_heads=1, k_head_dim=2, v_head_dim=2)
LAYOUT = KVLayout(fingerprint="0" * 64, dtype="float32", layers=(LAYER, LAYER))


@dataclass
class Pipe:
    """What the scheduler sees of a link: is the other side taking slabs in, and have they been copied out here?"""

    has_room: bool = True
    copied_out: bool = True


def make(num_blocks: int = 64, block_size: int = 4, **limits) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, PrefillLimits(**limits), lambda salt: root_key("m", salt)), pool


def add(
    scheduler: Scheduler, name: str, prompt: list[int], now: float = 0.0, link: Pipe | None = None, **change
) -> None:
    fields = {
        "request": name, "attempt": 1, "prompt": prompt, "output": [], "choice": 0, "num_choices": 1,
        "params": SamplingParams(max_tokens=4, seed=1), "decode": DECODE, "reservation": 1, "held_tokens": 0,
        "deadline_s": 30.0, "cache_salt": "", "priority": 0,
    }  # fmt: skip
    message = Prefill(**{**fields, **change})
    scheduler.add(message, Outgoing(name, 1, 1, 0, link or Pipe(), LAYOUT), now)  # type: ignore[arg-type]


def run(scheduler: Scheduler, now: float = 0.0) -> list[tuple[str, int, int]]:
    """One turn as the worker does it; returns (request, start, count) of its work."""
    batch: list[Work] = scheduler.plan(now, None)
    for work in batch:
        scheduler.computed(work)
        if work.end == len(work.prompt.tokens):
            scheduler.all_sent(work.prompt)
    scheduler.check_invariants()
    return [(w.prompt.key[0], w.start, w.count) for w in batch]


def test_a_long_prompt_runs_in_chunks_within_the_budget() -> None:
    scheduler, _ = make(chunk_tokens=10)
    add(scheduler, "a", list(range(25)))
    assert [run(scheduler) for _ in range(3)] == [[("a", 0, 10)], [("a", 10, 10)], [("a", 20, 5)]]
    assert run(scheduler) == []


def test_short_prompts_go_first_and_share_a_step() -> None:
    scheduler, _ = make(chunk_tokens=10)
    add(scheduler, "long", list(range(40)))
    add(scheduler, "s1", [1, 2, 3])
    add(scheduler, "s2", [4, 5])
    assert run(scheduler) == [("s2", 0, 2), ("s1", 0, 3), ("long", 0, 5)]
    add(scheduler, "s3", [1, 2, 3, 4, 5, 6])
    assert run(scheduler) == [("s3", 0, 6)], "more than half of a step is enough where a prompt ends"


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    scheduler, _ = make(num_blocks=1000, chunk_tokens=10)
    add(scheduler, "long", list(range(1000, 1200)))
    for turn in range(200):
        now = turn * 0.5
        add(scheduler, f"s{turn}", [turn] * 10, now=now)
        if any(name == "long" for name, _, _ in run(scheduler, now)):
            return
    pytest.fail("the long prompt never ran")


def test_short_prompts_pass_one_that_has_waited_for_long_but_leave_it_a_quarter() -> None:
    scheduler, _ = make(num_blocks=1000, chunk_tokens=10)
    add(scheduler, "long", list(range(1000, 1200)))
    waits: list[int] = []
    computed = 0
    for turn in range(60):
        now = 100.0 + turn
        add(scheduler, f"s{turn}", [turn] * 10, now=now)
        work = run(scheduler, now)
        computed += sum(count for name, _, count in work if name == "long")
        waits += [turn - int(name[1:]) for name, _, _ in work if name != "long"]
    assert 150 <= computed <= 160, "of 600"
    assert waits[:20] == sorted(waits[:20])
    assert waits[1] <= 1


@pytest.mark.parametrize(("tokens_per_s", "count"), [(None, 256), (10.0, 64), (800.0, 120), (1e5, 256)])
def test_step_takes_as_many_tokens_as_are_computed_in_a_moment(tokens_per_s: float | None, count: int) -> None:
    scheduler, _ = make(num_blocks=1000, chunk_tokens=256)
    add(scheduler, "long", list(range(1000)))
    assert [work.count for work in scheduler.plan(0.0, tokens_per_s)] == [count]


def test_cached_blocks_are_not_computed_again() -> None:
    scheduler, _ = make(chunk_tokens=100)
    add(scheduler, "a", list(range(18)))
    run(scheduler)
    add(scheduler, "b", [*range(16), 99, 98])
    assert run(scheduler) == [("b", 16, 2)]


def test_a_prompt_waits_for_the_prefix_somebody_is_computing() -> None:
    scheduler, _ = make(chunk_tokens=8)
    add(scheduler, "a", list(range(20)))
    run(scheduler)
    add(scheduler, "b", [*range(16), 99])
    assert run(scheduler) == [("a", 8, 8)]
    assert sorted(run(scheduler)) == [("a", 16, 4), ("b", 16, 1)]


def test_nobody_waits_for_the_prefix_of_a_prompt_that_is_stuck() -> None:
    scheduler, _ = make(chunk_tokens=8)
    slow = Pipe()
    add(scheduler, "a", list(range(20)), link=slow)
    run(scheduler)
    slow.has_room = False
    add(scheduler, "b", [*range(16), 99])
    assert run(scheduler) == [("b", 8, 8)]


def test_prompts_for_a_slow_decode_worker_are_passed_over_until_it_reads() -> None:
    scheduler, pool = make()
    slow = Pipe(has_room=False)
    add(scheduler, "a", [1, 2, 3], link=slow)
    add(scheduler, "b", [4, 5, 6])
    assert run(scheduler) == [("b", 0, 3)]
    assert pool.counts.held == 0
    slow.has_room = True
    assert run(scheduler) == [("a", 0, 3)]


def test_what_does_not_fit_waits_and_holds_nothing() -> None:
    scheduler, pool = make(num_blocks=6, chunk_tokens=8)
    add(scheduler, "a", list(range(20)))
    add(scheduler, "b", list(range(100, 121)))
    assert run(scheduler) == [("a", 0, 8)]
    assert pool.counts.held == 5
    run(scheduler)
    assert run(scheduler) == [("a", 16, 4)]
    assert run(scheduler) == [("b", 0, 8)]


def test_refusals_name_the_reason() -> None:
    scheduler, _ = make(num_blocks=2, max_waiting=1)
    add(scheduler, "a", [1])
    message = next(iter(scheduler)).message
    assert "waiting" in scheduler.refusal(message)
    empty, _ = make(num_blocks=2)
    add(scheduler, "b", list(range(9)))
    assert "blocks" in empty.refusal(scheduler.get(("b", 1)).message)  # type: ignore[union-attr]


@pytest.mark.parametrize("state", list(State)[:3])
def test_a_cancel_in_any_state_gives_every_block_back(state: State) -> None:
    scheduler, pool = make(chunk_tokens=4)
    add(scheduler, "a", list(range(8)))
    for _ in range([State.WAITING, State.COMPUTING, State.SENDING].index(state)):
        run(scheduler)
    assert [p.state for p in scheduler] == [state]
    scheduler.drop(("a", 1))
    assert not scheduler.keys
    assert pool.counts.held == 0
    scheduler.check_invariants()
