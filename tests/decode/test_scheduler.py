"""The decode scheduler: rank, admission, preemption, choices. Blocks balance and something always progresses."""

import dataclasses
import random

import pytest

from pdserve.decode.preemption import SwapSpace
from pdserve.decode.scheduler import DecodeLimits, Plan, Scheduler
from pdserve.decode.sequence import Sequence, State
from pdserve.engine.block_pool import BlockPool, root_key
from pdserve.transfer.messages import (
    Reserve,
)
from pdserve.transfer.sampling_params import SamplingParams

EOS = frozenset({0})
PREFILL = "prefill-0#00000000"


def reserve(name: str, prompt: list[int], max_tokens: int = 8, **change) -> Reserve:
    fields = {
        "request": name, "attempt": 1, "prompt": prompt, "outputs": [[]], "finished": [False],
        "params": SamplingParams(max_tokens=max_tokens, seed=1), "prefill": "", "local_prefill": "always",
        "local_reason": "no_prefill", "cache_salt": "", "priority": 0, "age_s": 0.0,
    }  # fmt: skip
    return Reserve(**{**fields, **change})


def make(num_blocks: int = 16, block_size: int = 4, swap_tokens: int = 0, **limits) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size)
    swap = SwapSpace(swap_tokens)
    return Scheduler(pool, DecodeLimits(**limits), lambda salt: root_key("m", salt), EOS, swap), pool


def next_token(tokens: list[int], choice: int) -> int:
    """A stand-in for the model: depends on everything before, never EOS."""
    return 1 + (sum((i + 1) * t for i, t in enumerate(tokens)) + 31 * choice) % 97


class Rig:
    """Runs a scheduler as the worker does, with `next_token` for a model; `deliver` completes a remote prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.out: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.revoked: list[str] = []
        self.moved: list[Sequence] = []
        self.swapped = 0
        self.preempted = 0

    def start(self, sequence: Sequence) -> None:
        first = sequence.choice
        count = sequence.num_choices
        tokens = [next_token(sequence.tokens, first + c) for c in range(count)]
        family, _ = self.scheduler.split(sequence)
        for member in family:
            self.append(member, tokens[member.choice - first])

    def append(self, sequence: Sequence, token: int) -> None:
        index = len(sequence.output)
        out = self.out.setdefault((sequence.request, sequence.choice), [])
        assert index == len(out)
        out.append(token)
        if self.scheduler.append(sequence, token):
            self.ended.add((sequence.request, sequence.choice))

    def turn(self, chunk: int = 8) -> Plan:
        self.now += 0.1
        plan = self.scheduler.plan(self.now, lambda running: chunk)
        for s in plan.admitted:
            s.announced = True
        self.revoked += [s.request for s in plan.revoked]
        self.moved += plan.moved
        self.preempted += len(plan.preempted)
        for order in plan.swapped_in:
            assert order.first_token <= order.num_tokens <= order.sequence.table.capacity_tokens
            self.scheduler.swap.forget(order.sequence)
            self.swapped += 1
        samples = [w.samples for w in plan.batch]
        for work, does in zip(plan.batch, samples, strict=True):
            assert work.start + work.count <= work.sequence.table.capacity_tokens
            self.scheduler.computed(work)
            if does and work.sequence.state is State.COMPUTING:
                self.start(work.sequence)
            elif does:
                self.append(work.sequence, next_token(work.sequence.tokens, work.sequence.choice))
        self.scheduler.check_invariants()
        return plan

    def deliver(self, sequence: Sequence) -> None:
        self.scheduler.received(sequence)
        self.start(sequence)


def expected(prompt: list[int], max_tokens: int, choice: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


def test_every_running_sequence_is_in_every_step() -> None:
    scheduler, _ = make()
    rig = Rig(scheduler)
    for name in "abc":
        scheduler.add(reserve(name, [1, 2, 3]), rig.now)
    for _ in range(3):
        rig.turn()
    assert {w.sequence.request for w in rig.turn().batch} == {"a", "b", "c"}


def test_at_most_one_bounded_chunk_of_local_prefill_joins_a_step() -> None:
    scheduler, _ = make(64)
    rig = Rig(scheduler)
    scheduler.add(reserve("a", [1, 2]), rig.now)
    rig.turn()
    scheduler.add(reserve("b", list(range(1, 30))), rig.now)
    scheduler.add(reserve("c", list(range(2, 30))), rig.now)
    counts = [w.count for w in rig.turn(chunk=5).batch]
    assert sorted(counts) == [1, 5]


def test_nobody_passes_the_head_of_the_queue() -> None:
    scheduler, _ = make(num_blocks=4)
    rig = Rig(scheduler)
    scheduler.add(reserve("a", [1] * 7, max_tokens=5), rig.now)
    rig.turn()
    scheduler.add(reserve("big", [2] * 12, max_tokens=4), rig.now)
    scheduler.add(reserve("tiny", [3], max_tokens=1), rig.now)
    assert [s.request for s in rig.turn().admitted] == []
    order = []
    while len(rig.ended) < 3:
        order += [s.request for s in rig.turn().admitted]
    assert order == ["big", "tiny"]


def test_priority_and_age_decide_the_rank() -> None:
    scheduler, _ = make(num_blocks=2, max_sequences=1)
    rig = Rig(scheduler)
    scheduler.add(reserve("plain", [1]), rig.now)
    scheduler.add(reserve("late", [1], priority=1), rig.now)
    scheduler.add(reserve("urgent", [1], priority=-1), rig.now)
    scheduler.add(reserve("old", [1], age_s=60.0), rig.now)
    assert [s.request for s in scheduler.in_state(State.WAITING)] == ["old", "urgent", "plain", "late"]


def test_growth_revokes_the_youngest_reservation_before_it_preempts() -> None:
    scheduler, _ = make(num_blocks=5)
    rig = Rig(scheduler)
    scheduler.add(reserve("a", [1, 2, 3], max_tokens=17), rig.now)
    rig.turn()
    remote = {"prefill": PREFILL, "local_prefill": "never"}
    scheduler.add(reserve("r1", [5] * 4, **remote), rig.now)
    scheduler.add(reserve("r2", [6] * 4, **remote), rig.now)
    rig.turn()
    assert len(scheduler.in_state(State.RECEIVING)) == 2
    for _ in range(15):
        rig.turn()
    assert rig.revoked[0] == "r2"
    assert rig.preempted == 0
    assert rig.out["a", 0] == expected([1, 2, 3], 17)[: len(rig.out["a", 0])]


@pytest.mark.parametrize(("mode", "swap_tokens"), [("recompute", 1000), ("swap", 1000), ("auto", 25), ("swap", 0)])
def test_preempted_sequences_continue_with_the_same_tokens(mode: str, swap_tokens: int) -> None:
    scheduler, pool = make(num_blocks=10, swap_tokens=swap_tokens, preemption=mode)
    rig = Rig(scheduler)
    prompts = {f"r{i}": [i + 1] * 5 for i in range(6)}
    for name, prompt in prompts.items():
        scheduler.add(reserve(name, prompt, max_tokens=24), rig.now)
    for _ in range(1000):
        rig.turn()
        if len(rig.ended) == 6:
            break
    assert rig.preempted > 0
    assert (rig.swapped > 0) == (mode != "recompute" and swap_tokens > 0)
    for name, prompt in prompts.items():
        assert rig.out[name, 0] == expected(prompt, 24)
    assert pool.counts.held == 0
    assert scheduler.swap.used_tokens == 0


def test_a_single_choice_that_came_from_prefill_goes_back_there_when_it_cannot_be_swapped() -> None:
    scheduler, _ = make(num_blocks=6)
    rig = Rig(scheduler)
    for name in "ab":
        scheduler.add(reserve(name, [ord(name)] * 8, max_tokens=16, prefill=PREFILL, local_prefill="never"), rig.now)
    rig.turn()
    for sequence in scheduler.in_state(State.RECEIVING):
        rig.deliver(sequence)
    while not rig.moved:
        rig.turn()
    assert [s.request for s in rig.moved] == ["b"]
    assert scheduler.keys == {("a", 1)}


def test_a_cancelled_sequence_gives_its_host_memory_back() -> None:
    scheduler, _ = make(num_blocks=6, swap_tokens=1000)
    rig = Rig(scheduler)
    for name in "ab":
        scheduler.add(reserve(name, [ord(name)] * 8, max_tokens=16), rig.now)
    while not scheduler.swap.used_tokens:
        rig.turn()
    scheduler.drop(("b", 1))
    assert scheduler.swap.used_tokens == 0
    scheduler.check_invariants()


def test_the_best_ranked_sequence_is_never_a_victim() -> None:
    scheduler, _ = make(num_blocks=6)
    rig = Rig(scheduler)
    for i in range(4):
        scheduler.add(reserve(f"r{i}", [i + 1] * 4, max_tokens=20), rig.now)
    while len(rig.ended) < 4:
        before = len(rig.out.get(("r0", 0), []))
        plan = rig.turn()
        assert all(s.request != "r0" for s in plan.preempted)
        if ("r0", 0) not in rig.ended and before:
            assert len(rig.out["r0", 0]) == before + 1


@pytest.mark.parametrize("remote", [False, True])
def test_choices_share_the_prompt_and_go_their_own_ways(remote: bool) -> None:
    scheduler, pool = make(num_blocks=32)
    rig = Rig(scheduler)
    prompt = list(range(1, 11))
    change = {"prefill": PREFILL, "local_prefill": "never"} if remote else {}
    scheduler.add(reserve("a", prompt, outputs=[[], [], []], finished=[False] * 3, **change), rig.now)
    rig.turn()
    if remote:
        rig.deliver(scheduler.in_state(State.RECEIVING)[0])
    else:
        rig.turn()
    assert pool.counts.held == 3 + 1 + 1  # two full blocks shared, one partial block each
    for _ in range(40):
        rig.turn()
    assert {key: rig.out[key] for key in rig.ended} == {("a", c): expected(prompt, 8, c) for c in range(3)}
    assert pool.counts.held == 0


def test_choices_that_do_not_fit_come_back_like_preempted_ones() -> None:
    scheduler, pool = make(num_blocks=4)
    rig = Rig(scheduler)
    prompt = [1, 2, 3, 4, 5, 6]
    scheduler.add(reserve("a", prompt, max_tokens=6, outputs=[[]] * 4, finished=[False] * 4), rig.now)
    for _ in range(200):
        rig.turn()
    assert {key: rig.out[key] for key in rig.ended} == {("a", c): expected(prompt, 6, c) for c in range(4)}
    assert pool.counts.held == 0


def test_a_step_never_has_more_rows_than_max_sequences_however_many_choices() -> None:
    scheduler, pool = make(num_blocks=64, max_sequences=3)
    rig = Rig(scheduler)
    for name in ("a", "b"):
        choices = {"outputs": [[]] * 4, "finished": [False] * 4}
        scheduler.add(reserve(name, [1, 2, 3, 4, 5, 6], max_tokens=6, **choices), rig.now)
    rows = [len(rig.turn().batch) for _ in range(200)]
    assert max(rows) == 3
    assert {key: rig.out[key] for key in rig.ended} == {
        (name, choice): expected([1, 2, 3, 4, 5, 6], 6, choice) for name in ("a", "b") for choice in range(4)
    }
    assert pool.counts.held == 0


def test_a_choice_cancelled_before_the_split_never_runs() -> None:
    scheduler, pool = make()
    rig = Rig(scheduler)
    scheduler.add(reserve("a", [1, 2, 3], outputs=[[], []], finished=[False, False]), rig.now)
    scheduler.drop(("a", 1), choice=0)
    for _ in range(20):
        rig.turn()
    assert set(rig.out) == {("a", 1)}
    assert pool.counts.held == 0


def test_cancelling_every_choice_one_by_one_ends_the_attempt() -> None:
    scheduler, _ = make()
    rig = Rig(scheduler)
    scheduler.add(reserve("a", [1, 2, 3], outputs=[[], []], finished=[False, False]), rig.now)
    scheduler.drop(("a", 1), choice=0)
    scheduler.drop(("a", 1), choice=1)
    assert not scheduler.keys


def test_resumed_choices_go_on_from_their_tokens() -> None:
    scheduler, _ = make(num_blocks=32)
    rig = Rig(scheduler)
    prompt = [4, 5, 6]
    full = {c: expected(prompt, 8, c) for c in range(3)}
    scheduler.add(reserve("a", prompt, outputs=[full[0][:3], full[1], full[2][:6]], finished=[False, True, False]), 0.0)
    rig.out = {("a", 0): full[0][:3], ("a", 2): full[2][:6]}
    for _ in range(30):
        rig.turn()
    assert rig.ended == {("a", 0), ("a", 2)}
    assert rig.out == {("a", 0): full[0], ("a", 2): full[2]}


@pytest.mark.parametrize("state", [State.WAITING, State.RECEIVING, State.COMPUTING, State.RUNNING])
def test_a_cancel_in_any_state_gives_every_block_back(state: State) -> None:
    scheduler, pool = make(num_blocks=32)
    rig = Rig(scheduler)
    remote = {"prefill": PREFILL, "local_prefill": "never"} if state is State.RECEIVING else {}
    prompt = [1] * (30 if state is State.COMPUTING else 3)
    scheduler.add(reserve("a", prompt, **remote), rig.now)
    while state is not State.WAITING and not scheduler.in_state(state):
        rig.turn()
    assert [s.state for s in scheduler] == [state]
    scheduler.drop(("a", 1))
    scheduler.check_invariants()
    assert pool.counts.held == 0
    assert not scheduler.keys


def test_short_remainders_are_local_when_allowed_and_remote_otherwise() -> None:
    scheduler, _ = make(num_blocks=64, local_tokens=8)
    rig = Rig(scheduler)
    for name, length, mode in [("s", 6, "auto"), ("l", 20, "auto"), ("n", 6, "never")]:
        scheduler.add(reserve(name, [ord(name)] * length, prefill=PREFILL, local_prefill=mode), rig.now)
    rig.turn()
    assert {s.request: s.state for s in scheduler} == {
        "s": State.RUNNING, "l": State.RECEIVING, "n": State.RECEIVING,
    }  # fmt: skip


def test_a_reservation_without_progress_expires_and_one_with_progress_does_not() -> None:
    scheduler, _ = make(transfer_deadline_s=5.0)
    rig = Rig(scheduler)
    for name in "ab":
        scheduler.add(reserve(name, [ord(name)] * 4, prefill=PREFILL, local_prefill="never"), rig.now)
    rig.turn()
    scheduler.progress(scheduler.find(("a", 1))[0], 4.0)
    assert [s.request for s in scheduler.expired(6.0)] == ["b"]


def test_what_prefill_has_let_go_of_is_waited_for_only_a_little_longer() -> None:
    scheduler, _ = make(transfer_deadline_s=30.0, let_go_deadline_s=3.0)
    rig = Rig(scheduler)
    for name in "abc":
        scheduler.add(reserve(name, [ord(name)] * 4, prefill=PREFILL, local_prefill="never"), rig.now)
    rig.turn()
    scheduler.listed(PREFILL, {("a", 1), ("b", 1)}, 1.0)
    assert scheduler.expired(5.0) == []
    scheduler.listed(PREFILL, {("a", 1)}, 2.0)  # `b` has been handed to the link; `c` was never begun
    scheduler.listed("prefill-9#00000000", set(), 2.0)  # it has nothing to do with these
    assert [s.request for s in scheduler.expired(5.5)] == ["b"]
    scheduler.progress(scheduler.find(("b", 1))[0], 5.0)  # a slab came after all
    assert scheduler.expired(8.0) == []


def test_a_request_that_can_never_fit_is_refused_with_the_limit() -> None:
    scheduler, _ = make(num_blocks=4, block_size=4, max_model_len=30)
    for max_tokens, limit in ((7, "16"), (21, "30")):
        reason, detail = scheduler.refusal(reserve("a", [1] * 10, max_tokens=max_tokens)) or ("", "")
        assert reason == "too_long"
        assert limit in detail
    assert scheduler.refusal(reserve("a", [1] * 10, max_tokens=6)) is None


def test_token_ids_past_the_vocabulary_are_refused() -> None:
    scheduler, _ = make(vocab_size=10)
    assert scheduler.refusal(reserve("a", [9])) is None
    assert scheduler.refusal(reserve("a", [10])) is not None
    assert scheduler.refusal(reserve("a", [9], outputs=[[10]])) is not None


def resumed(message: Reserve, rig: Rig) -> Reserve:
    """The next attempt as the gateway makes it: with the tokens it has."""
    choices = range(len(message.outputs))
    outputs = [rig.out.get((message.request, choice), []) for choice in choices]
    finished = [(message.request, choice) in rig.ended for choice in choices]
    return dataclasses.replace(message, outputs=outputs, finished=finished)


@pytest.mark.parametrize("seed", range(40))
def test_random_load_finishes_exactly_and_leaves_nothing(seed: int) -> None:
    """Arrivals, remote prompts, cancels, choices and resumed requests over a pool far too small for all of them."""
    chance = random.Random(seed)
    scheduler, pool = make(
        num_blocks=chance.randint(8, 14), max_sequences=chance.randint(1, 8), local_tokens=4,
        swap_tokens=chance.choice([0, 10, 30, 200]), preemption=chance.choice(["auto", "swap", "recompute"]),
    )  # fmt: skip
    rig = Rig(scheduler)
    wanted: dict[str, Reserve] = {}
    cancelled: set[str] = set()
    for turn in range(3000):
        if turn < 60 and chance.random() < 0.4:
            name = f"r{turn}"
            prompt = [chance.randint(1, 2) for _ in range(chance.randint(1, 16))]
            n = chance.choice([1, 1, 1, 2])
            mode = chance.choice(["always", "auto", "never"])
            wanted[name] = reserve(
                name, prompt, max_tokens=chance.randint(1, 12), outputs=[[]] * n, finished=[False] * n,
                prefill="" if mode == "always" else PREFILL, local_prefill=mode, priority=chance.randint(-1, 1),
            )  # fmt: skip
            scheduler.add(wanted[name], rig.now)
        rig.turn(chunk=chance.randint(1, 9))
        for name in [*rig.revoked, *(s.request for s in rig.moved)]:
            if name not in cancelled:
                scheduler.add(resumed(wanted[name], rig), rig.now)
        rig.revoked.clear()
        rig.moved.clear()
        for sequence in scheduler.in_state(State.RECEIVING):
            if chance.random() < 0.5:
                rig.deliver(sequence)
        if wanted and chance.random() < 0.05:
            name = chance.choice(list(wanted))
            if not any(key[0] == name for key in rig.ended):
                cancelled.add(name)
                scheduler.drop((name, 1))
        scheduler.check_invariants()
        if turn >= 60 and not scheduler.keys:
            break
    assert not scheduler.keys
    assert pool.counts.held == 0
    assert scheduler.swap.used_tokens == 0
    for name, message in wanted.items():
        if name not in cancelled:
            for choice in range(len(message.outputs)):
                assert rig.out[name, choice] == expected(message.prompt, message.params.max_tokens, choice)
