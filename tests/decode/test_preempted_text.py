"""A sequence that is preempted at every k-th token says what it would have said undisturbed."""

from dataclasses import replace

import pytest

from pdserve.decode.metrics import DecodeMetrics
from pdserve.decode.preemption import SwapSpace
from pdserve.decode.scheduler import DecodeLimits, Plan, Scheduler
from pdserve.decode.sequence import Sequence, State
from pdserve.decode.speed import ChunkLimits, Speeds
from pdserve.decode.stepper import Stepper
from pdserve.engine.block_pool import BlockPool, root_key
from pdserve.engine.grammar import Grammars
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import LoadedModel
from pdserve.engine.setup import Engine
from pdserve.transfer.messages import (
    Reserve,
)
from pdserve.transfer.sampling_params import SamplingParams
from tests.engine.tiny_models import build, load, prompts

BLOCK_SIZE = 4
PROMPTS = prompts([37, 5, 18])
PARAMS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.1, "top_k": 40, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    "stopped": {"temperature": 0.9, "stop_token_ids": list(range(10, 24)), "min_tokens": 5},
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(build("llama"))


class Decoder:
    """The decode worker's turn without its sockets; `every` tokens of a sequence it is preempted."""

    def __init__(self, model: LoadedModel, every: int | None, preemption: str, swap_tokens: int) -> None:
        engine = Engine(model, KVCache(model.layout, 80, BLOCK_SIZE), BlockPool(80, BLOCK_SIZE))
        swap = SwapSpace(swap_tokens)
        self.engine = engine
        limits = DecodeLimits(preemption=preemption)
        self.scheduler = Scheduler(engine.pool, limits, lambda salt: root_key("m", salt), frozenset(), swap)
        speeds = Speeds(ChunkLimits(256, BLOCK_SIZE))
        self.stepper = Stepper(engine, swap, DecodeMetrics(), lambda: None, Grammars(None), speeds)
        self.every = every
        self.text: dict[tuple[str, int], list[int]] = {}
        self.swaps = self.recomputes = 0

    def start(self, sequence: Sequence, tokens: list[int]) -> None:
        first = sequence.choice
        family, copies = self.scheduler.split(sequence)
        for source, target in copies:
            self.engine.cache.copy_block(source, target)
        for member in family:
            self.append(member, tokens[member.choice - first])

    def append(self, sequence: Sequence, token: int) -> None:
        self.text.setdefault((sequence.request, sequence.choice), []).append(token)
        self.scheduler.append(sequence, token)

    def disturb(self) -> None:
        """Take the blocks of every sequence that has said another `every` tokens."""
        plan = Plan()
        for sequence in self.scheduler.in_state(State.RUNNING):
            if self.every is not None and len(sequence.output) % self.every == 0:
                self.scheduler.evict(sequence, plan)
        self.stepper.move_swapped(plan)
        self.swaps += len(plan.swapped_out)
        self.recomputes += len(plan.recomputed)
        for block in self.engine.pool.allocate(self.engine.pool.num_available):  # whoever comes next overwrites
            self.engine.pool.release([block])

    def turn(self) -> None:
        plan = self.scheduler.plan(0.0, lambda running: 7)
        for sequence in plan.admitted:
            sequence.announced = True
        self.stepper.move_swapped(plan)
        step = self.stepper.run(plan.batch)
        assert step is not None
        for work in plan.batch:
            self.scheduler.computed(work)
        for sequence, tokens, _ in self.stepper.pick(step[0], [work for work in plan.batch if work.samples]):
            assert tokens is not None
            if sequence.state is State.COMPUTING:
                self.start(sequence, tokens)
            else:
                self.append(sequence, tokens[0])
        self.scheduler.check_invariants()
        self.disturb()

    def run(self, params: dict[str, object], num_choices: int) -> dict[tuple[str, int], list[int]]:
        for i, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(max_tokens=17, seed=1000 + i, **params)
            self.scheduler.add(
                Reserve(
                    f"r{i}", 1, prompt, [[]] * num_choices, [False] * num_choices, sampling, "", "always", "", "", 0
                ),
                now=float(i),
            )
        while self.scheduler.keys:
            self.turn()
        assert self.engine.pool.counts.held == 0
        assert self.scheduler.swap.used_tokens == 0
        return self.text


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(("preemption", "swap_tokens"), [("swap", 10_000), ("recompute", 0), ("auto", 60)])
def test_preemption_at_every_kth_token_changes_nothing(
    model: LoadedModel, kind: str, preemption: str, swap_tokens: int
) -> None:
    undisturbed = Decoder(model, None, preemption, swap_tokens).run(PARAMS[kind], 2)
    assert any(len(text) > 8 for text in undisturbed.values())
    for every in range(1, 9):
        decoder = Decoder(model, every, preemption, swap_tokens)
        assert decoder.run(PARAMS[kind], 2) == undisturbed
        assert decoder.swaps + decoder.recomputes > 0
        assert (decoder.swaps > 0) == (preemption != "recompute")


def test_a_swap_brings_int8_and_its_scales_back(model: LoadedModel) -> None:
    model = replace(model, layout=replace(model.layout, dtype="int8"))
    undisturbed = Decoder(model, None, "swap", 10_000).run(PARAMS["greedy"], 2)
    for every in (1, 3):
        decoder = Decoder(model, every, "swap", 10_000)
        assert decoder.run(PARAMS["greedy"], 2) == undisturbed
        assert decoder.swaps > 0
