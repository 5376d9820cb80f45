"""Captured decode steps: the same numbers as an eager step, whatever fills the fixed size up, and no block harmed.

`call_again` stands where CUDA's graphs do; buffers, padding, ladder and the model's step are what a GPU runs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.utils import import_utils

from pdserve.engine import runner as runner_module
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.graphs import DecodeGraphs, call_again, capture_decode_steps, ladder
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.runner import Chunk, Runner
from pdserve.transfer.errors import StepCancelled
from tests.engine.tiny_models import FAMILIES, build, fragmented_tables, poisoned_cache, prompts, reference

BLOCK_SIZE = 4
MAX_LEN = 64
LENGTHS = [1, 17, 4, 30, 9]
NUM_BLOCKS = 33  # just what they need with 12 tokens more: every block of the pool is somebody's


class Setup:
    """A model over a poisoned cache, with the prompts of LENGTHS computed (all but their last token)."""

    def __init__(self, family: str = "llama", *, fused: bool = True, capture: Callable = call_again) -> None:
        self.loaded: LoadedModel = describe(
            build(family), fingerprint="tiny", max_model_len=MAX_LEN, fused_modules=fused
        )
        self.cache: KVCache = poisoned_cache(self.loaded, NUM_BLOCKS, BLOCK_SIZE)
        self.runner = Runner(self.loaded, self.cache)
        self.graphs = DecodeGraphs(self.runner, ladder(6), MAX_LEN, capture)
        self.prompts = prompts(LENGTHS)
        self.tables = fragmented_tables(NUM_BLOCKS, [length + 12 for length in LENGTHS], BLOCK_SIZE)
        started = [
            Chunk(prompt[:-1], 0, table, False)
            for prompt, table in zip(self.prompts, self.tables, strict=True)
            if len(prompt) > 1
        ]
        self.runner.forward(started)

    def chunks(self, rows: list[int]) -> list[Chunk]:
        return [Chunk(self.prompts[row][-1:], LENGTHS[row] - 1, self.tables[row], True) for row in rows]

    def tensors(self) -> list[Tensor]:
        return [tensor.clone() for tensor in (*self.cache.keys, *self.cache.values)]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])],
)
def test_the_ladder_ends_with_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert ladder(most) == sizes


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "gemma2", "gpt-oss", "mixtral", "deepseek-v3", "gpt2"])
def test_a_replay_gives_the_logits_and_the_kv_of_an_eager_step(family: str, fused: bool) -> None:
    eager, replayed = Setup(family, fused=fused), Setup(family, fused=fused)
    for rows in ([3, 0, 1], [4, 2, 0, 1, 3], [1]):
        expected = eager.runner.forward(eager.chunks(rows))
        assert replayed.graphs.takes(replayed.chunks(rows))
        torch.testing.assert_close(replayed.graphs.run(replayed.chunks(rows)), expected, rtol=0, atol=2e-5)
    for found, wanted in zip(replayed.tensors(), eager.tensors(), strict=True):
        torch.testing.assert_close(found[:-1], wanted[:-1], rtol=0, atol=1e-5, equal_nan=True)


def test_where_all_layers_are_native_a_replay_is_the_eager_step_to_the_bit() -> None:
    eager, replayed = Setup(), Setup()
    rows = [3, 0, 1]
    assert torch.equal(replayed.graphs.run(replayed.chunks(rows)), eager.runner.forward(eager.chunks(rows)))


def test_rows_that_fill_up_write_to_no_block_of_the_pool() -> None:
    setup = Setup()
    rows = [0, 1, 3, 4]
    before = setup.tensors()
    assert ladder(6) == [1, 2, 4, 6]
    setup.graphs.run(setup.chunks([*rows, 2]))  # 5 rows run as 6
    for tensor, old in zip(setup.tensors(), before, strict=True):
        changed = ((tensor != old) & ~(tensor.isnan() & old.isnan())).flatten(2).any(2)
        slots = {
            (setup.tables[row][(LENGTHS[row] - 1) // BLOCK_SIZE], (LENGTHS[row] - 1) % BLOCK_SIZE) for row in range(5)
        }
        assert {(block, offset) for block, offset in changed.nonzero().tolist() if block < NUM_BLOCKS} == slots


def test_a_smaller_batch_after_a_larger_one_leaves_the_larger_ones_blocks_alone() -> None:
    """What the buffers still hold of the step before must not be computed again."""
    setup = Setup()
    setup.graphs.run(setup.chunks([0, 1, 2, 3, 4]))
    before = setup.tensors()
    last = [Chunk([7], LENGTHS[row], setup.tables[row], True) for row in (1, 2, 3)]
    setup.graphs.run(last)  # 3 rows run as 4
    for tensor, old in zip(setup.tensors(), before, strict=True):
        changed = ((tensor != old) & ~(tensor.isnan() & old.isnan())).flatten(2).any(2)
        slots = {(setup.tables[row][LENGTHS[row] // BLOCK_SIZE], LENGTHS[row] % BLOCK_SIZE) for row in (1, 2, 3)}
        assert {(block, offset) for block, offset in changed.nonzero().tolist() if block < NUM_BLOCKS} == slots


def test_greedy_text_by_replays_is_that_of_generate() -> None:
    setup = Setup()
    outputs: list[list[int]] = [[] for _ in LENGTHS]
    for turn in range(8):
        rows = [row for row in range(len(LENGTHS)) if turn < 8 - row]  # fewer and fewer: several sizes
        chunks = [
            Chunk(
                (setup.prompts[row] + outputs[row])[-1:], LENGTHS[row] - 1 + turn, setup.tables[row], True
            )
            for row in rows
        ]  # fmt: skip
        for row, token in zip(rows, setup.graphs.run(chunks).argmax(dim=-1).tolist(), strict=True):
            outputs[row].append(token)
    assert outputs == [reference(build("llama"), prompt, 8 - row) for row, prompt in enumerate(setup.prompts)]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk([5, 6], 3, [0, 1], True),
        Chunk([5], 3, [0], False),
        Chunk([5], 3, [0], True, targets=[6]),
        Chunk([5], MAX_LEN, list(range(20)), True),
    ],
    ids=["two tokens", "not sampled", "scored", "past the table"],
)
def test_anything_but_single_sampled_tokens_runs_eagerly(chunk: Chunk) -> None:
    setup = Setup()
    assert setup.graphs.takes(setup.chunks([1, 3]))
    assert not setup.graphs.takes([*setup.chunks([1, 3]), chunk])
    assert not setup.graphs.takes(setup.chunks([1, 3]) * 4), "more rows than were captured"


def test_a_chunk_past_its_blocks_is_a_bug_not_a_write() -> None:
    setup = Setup()
    with pytest.raises(AssertionError, match="2 blocks for 9 tokens"):
        setup.graphs.run([Chunk([5], 8, [1, 2], True)])


def test_layers_are_announced_when_their_kv_is_there_and_a_cancel_comes_out() -> None:
    setup = Setup()
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        block, offset = setup.tables[1][16 // BLOCK_SIZE], 16 % BLOCK_SIZE
        assert not any(keys[block, offset].isnan().any() for keys in setup.cache.keys)
        seen.append(layer)
        if layer == 2 and len(seen) == 3:
            raise StepCancelled("nobody wants it")

    setup.runner.on_layer = on_layer
    with pytest.raises(StepCancelled):
        setup.graphs.run(setup.chunks([1]))
    seen.append(-1)
    setup.graphs.run(setup.chunks([1]))
    assert seen == [0, 1, 2, -1, 0, 1, 2, 3]


def test_every_size_is_captured_once_the_largest_first_and_replayed_only_from_then_on() -> None:
    events: list[str] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()
        name = f"{len(events)}"
        events.append(f"captured {name}")

        def replay() -> None:
            events.append(f"replayed {name}")
            step()

        return replay

    setup = Setup(capture=capture)
    assert events == [f"captured {i}" for i in range(4)]  # 6, 4, 2 and 1 rows
    for rows in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4]):
        setup.graphs.run(setup.chunks(rows))
    assert events[4:] == ["replayed 3", "replayed 2", "replayed 1", "replayed 1", "replayed 0"]


def test_the_runner_and_its_graphs_are_freed_together() -> None:
    setup = Setup()
    module = weakref.ref(setup.loaded.module)
    del setup
    gc.collect()
    assert module() is None


CAPTURABLE = sorted(FAMILIES.keys() - {"mixtral", "qwen2-moe-mask-only-window", "qwen3-moe", "gpt-oss", "deepseek-v3"})


@pytest.mark.parametrize("family", CAPTURABLE)
def test_a_step_never_looks_at_a_number_of_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it could not be captured. Tensors on `meta` hold no numbers, so looking at one raises."""
    loaded = describe(build(family), fingerprint="tiny", max_model_len=MAX_LEN, fused_modules=False)
    loaded.module.to("meta")
    runner = Runner(loaded, KVCache(loaded.layout, 8, BLOCK_SIZE, "meta"))
    monkeypatch.setattr(
        import_utils, "is_cuda_stream_capturing", lambda: True
    )  # transformers asks, and then looks away
    monkeypatch.setattr(
        runner_module, "decode_attention", lambda q, k, v, *_, **__: q.new_empty(*q.shape[:2], v.shape[3])
    )
    graphs = DecodeGraphs(runner, [3], MAX_LEN, call_again)
    assert graphs.run([Chunk([5], 6, [1, 2], True)]).shape == (1, loaded.vocab_size)


def idle(num_blocks: int = NUM_BLOCKS) -> BlockPool:
    return BlockPool(num_blocks, BLOCK_SIZE)


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def capture(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    setup, pool = Setup(), idle()
    assert capture_decode_steps(setup.runner, pool, 4, capture) is None
    assert "without CUDA graphs: operation not permitted when stream is capturing" in caplog.text
    assert pool.counts.held == 0


def test_graphs_that_say_something_else_than_the_model_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def captures_nothing(step: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    setup, pool = Setup(), idle()
    assert capture_decode_steps(setup.runner, pool, 4, captures_nothing) is None
    assert "replayed logits differ" in caplog.text
    assert capture_decode_steps(setup.runner, pool, 4, call_again) is not None
    assert pool.counts.held == 0
