"""The memory set aside for a step: more than any step takes, whatever a worker is asked for; and what is left for KV.

There is no GPU here, but there are allocations: `Meter` counts the bytes of every tensor that torch makes and forgets,
so the largest step is measured, and held against others, as an allocator would see them.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdserve.engine import budget
from pdserve.engine.budget import CONTEXT_BYTES, Need, WorstStep, kv_room_bytes, measure_need, prove
from pdserve.engine.graphs import call_again
from pdserve.engine.kv_cache import KVCache, plan_num_blocks
from pdserve.engine.logprobs import sampled_logprobs, score_prompts
from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.runner import Chunk, Runner
from pdserve.engine.sampler import SampleRow, sample
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.sampling_params import SamplingParams
from tests.engine.tiny_models import build

GIB = 1 << 30
BLOCK_SIZE = 4
WORST = WorstStep(chunk_tokens=40, max_rows=6)


class Meter(TorchDispatchMode):
    """A device whose allocator holds just what is in use: the tensors made since it was entered.

    But for doubles: only the sampler makes them, and always on the host.
    """

    def __init__(self, total_bytes: int = 16 * GIB) -> None:
        super().__init__()
        self.total = total_bytes
        self.live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.float64:
                storage = tensor.untyped_storage()
                self.live.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.reserved_bytes())
        return outputs

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.total - self.reserved_bytes()

    def reserved_bytes(self) -> int:
        self.live = {storage: size for storage, size in self.live.items() if not storage.expired()}
        return sum(self.live.values())

    def start_peak(self) -> None:
        self.peak = self.reserved_bytes()

    def peak_bytes(self) -> int:
        return self.peak

    def release_unused(self) -> None:
        pass


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return describe(build("llama"), fingerprint="tiny", max_model_len=64, fused_modules=False)


def random_step(runner: Runner, rng: random.Random) -> None:
    """Something a worker may be asked for: rows, a chunk, choices, grammars, scores, log probabilities."""
    num_rows, num_tokens = rng.randint(0, WORST.max_rows), rng.choice([0, 1, 7, WORST.chunk_tokens])
    blocks = [runner.cache.spare_block] * 16
    chunks = [Chunk([0], rng.randrange(64), blocks, True) for _ in range(num_rows)]
    if num_tokens:
        targets = [0] * num_tokens if rng.random() < 0.5 else []
        chunks.append(
            Chunk([0] * num_tokens, rng.randrange(65 - num_tokens), blocks, True, targets, rng.randint(0, 20))
        )
    if not chunks:
        return
    logits = runner.forward(chunks)
    for _ in score_prompts(runner, chunks, lambda: None):
        pass
    index = [row for row in range(len(chunks)) for _ in range(rng.choice([1, 4, 128]) if row == len(chunks) - 1 else 1)]
    picked = logits if index == list(range(len(chunks))) else logits[index]
    params = SamplingParams(max_tokens=1, seed=1, temperature=rng.choice([0.0, 1.0]), logprobs=rng.choice([None, 20]))
    mask = rng.choice([None, b"\xff" * 17])
    rows = [SampleRow(params, [0], [], row, mask) for row in range(len(picked))]
    sampled_logprobs(picked, rows, sample(picked, rows, frozenset()))


def test_no_step_takes_more_than_was_set_aside_for_the_largest(loaded: LoadedModel) -> None:
    with Meter() as meter:
        need = measure_need(loaded, BLOCK_SIZE, WORST, meter, None)
        runner = Runner(loaded, KVCache(loaded.layout, 20, BLOCK_SIZE))
        rng, taken = random.Random(4), []
        for _ in range(60):
            before = meter.reserved_bytes()
            meter.start_peak()
            random_step(runner, rng)
            taken.append(meter.peak_bytes() - before)
    assert max(taken) <= need.step
    assert max(taken) > 0.6 * need.step, "what is set aside is not out of all proportion"


def test_measuring_leaves_nothing_behind(loaded: LoadedModel) -> None:
    with Meter() as meter:
        measure_need(loaded, BLOCK_SIZE, WORST, meter, call_again)
        gc.collect()
        assert meter.reserved_bytes() < 4096


def test_a_longer_chunk_and_more_rows_need_more(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_CHOICES", 1)

    def step(worst: WorstStep) -> int:
        with Meter() as meter:
            return measure_need(loaded, BLOCK_SIZE, worst, meter, None).step

    small = step(WorstStep(8, 2))
    assert step(WorstStep(60, 2)) > small
    assert step(WorstStep(8, 40)) > small


def test_captured_steps_are_extrapolated_from_two(loaded: LoadedModel) -> None:
    class Device(Meter):
        free = 10 * GIB

        def free_bytes(self) -> int:
            return self.free

    device = Device()
    costs = iter([50 << 20, 3 << 20])

    def capture(step: Any) -> Any:
        device.free -= next(costs)
        return call_again(step)

    need = measure_need(loaded, BLOCK_SIZE, WorstStep(8, 20), device, capture)  # sizes 1, 2, 4, 8, 16 and 20
    assert need.graphs == (50 << 20) + 5 * (3 << 20)


def test_a_model_that_cannot_be_captured_needs_nothing_for_graphs(loaded: LoadedModel) -> None:
    def capture(step: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert measure_need(loaded, BLOCK_SIZE, WORST, Meter(), capture).graphs == 0


class Report(Meter):
    """A device of which the numbers are given."""

    def __init__(self, total: int, free: int, weights: int) -> None:
        super().__init__(total)
        self.free, self.weights = free, weights

    def free_bytes(self) -> int:
        return self.free

    def reserved_bytes(self) -> int:
        return self.weights


def test_kv_gets_the_share_less_weights_and_all_that_a_step_takes() -> None:
    need = Need(step=2 * GIB, graphs=GIB)
    assert (
        kv_room_bytes(Report(80 * GIB, 60 * GIB, 16 * GIB), 0.9, need) == 72 * GIB - 16 * GIB - CONTEXT_BYTES - 3 * GIB
    )


def test_kv_never_gets_what_another_process_has_taken() -> None:
    need = Need(step=2 * GIB, graphs=GIB)
    assert kv_room_bytes(Report(80 * GIB, 20 * GIB, 16 * GIB), 0.9, need) == 17 * GIB


def test_where_nothing_is_left_the_error_names_the_flag_and_every_number() -> None:
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0\.5: of 24\.00 GiB .* 11\.00 GiB of weights.*2\.00"
    ):
        kv_room_bytes(Report(24 * GIB, 12 * GIB, 11 * GIB), 0.5, Need(2 * GIB, 0))


def test_the_pool_takes_the_room_but_for_its_spare_block(loaded: LoadedModel) -> None:
    block_bytes = loaded.layout.bytes_per_token * 16
    assert plan_num_blocks(loaded.layout, 16, None, None, "cpu", 100 * block_bytes + 5) == 99
    assert plan_num_blocks(loaded.layout, 16, 50, None, "cpu", 100 * block_bytes) == 50
    with pytest.raises(ConfigError, match="--kv-blocks 101 needs"):
        plan_num_blocks(loaded.layout, 16, 101, None, "cpu", 100 * block_bytes)


def test_a_largest_step_that_does_not_fit_is_said_at_start_up(loaded: LoadedModel, monkeypatch: Any) -> None:
    runner = Runner(loaded, KVCache(loaded.layout, 20, BLOCK_SIZE))
    prove(runner, WORST)

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(budget, "sample", full)
    with pytest.raises(
        ConfigError, match=r"lower --gpu-memory-utilization: CUDA out of memory. Tried to allocate 2\.00 GiB"
    ):
        prove(runner, WORST)


def test_the_largest_step_writes_to_no_block_of_the_pool(loaded: LoadedModel) -> None:
    cache = KVCache(loaded.layout, 20, BLOCK_SIZE)
    prove(Runner(loaded, cache), WORST)
    assert all(not tensor[:-1].any() and tensor[-1].any() for tensor in (*cache.keys, *cache.values))
