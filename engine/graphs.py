"""Decode steps of a few fixed sizes, captured once and replayed: a GPU then gets one launch instead of hundreds.

A captured step reads and writes the same memory at every replay, so its inputs are buffers that are refilled, and its
size is fixed: a batch runs as the next size of a ladder. Rows that fill it up compute a token of their own in the
cache's spare block, which belongs to no sequence. Only batches of single tokens that sample are replayed; all others,
those that ask for scores of a prompt among them, run as they always did.

Nothing here needs a GPU: `Capture` is the seam. `call_again` in the place of CUDA's graphs runs the very same step over
the same buffers on any device.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..kernels.attention import DecodeBatch
from .block_pool import BlockPool
from .kv_cache import KVCache
from .probe import TOLERANCE
from .runner import Chunk, Runner

log = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8
MAX_REASON_CHARS = 300

GraphMode = Literal["auto", "never"]

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Runs a step at least once and returns what runs it again. Raises RuntimeError where that is impossible."""


def ladder(max_rows: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, then every eighth, and the largest itself."""
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, max_rows, SIZE_STEP), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def call_again(step: Callable[[], None]) -> Replay:
    """The `Capture` of devices without graphs: the step itself."""
    step()
    return step


class CudaCapture:
    """The `Capture` of CUDA. The graphs share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Replay:
        # What happens at a first run only (handles, compilation, tuning) must not happen while capturing.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


def capture_for(device: torch.device, mode: GraphMode) -> Capture | None:
    """How steps are captured on this device; None where they are not."""
    return CudaCapture(device) if device.type == "cuda" and mode == "auto" else None


class DecodeInputs:
    """The buffers a captured step reads, and their copy on the host, which is filled in first."""

    def __init__(self, rows: int, max_blocks: int, cache: KVCache) -> None:
        self._cache = cache
        self._on_gpu = cache.device.type == "cuda"
        # Token ids, positions, slots, context lengths.
        self._host = torch.zeros(4, rows, dtype=torch.int64, pin_memory=self._on_gpu)
        self._host_tables = torch.zeros(rows, max_blocks, dtype=torch.int64, pin_memory=self._on_gpu)
        self._device = torch.zeros(4, rows, dtype=torch.int64, device=cache.device)
        self._device_tables = torch.zeros(rows, max_blocks, dtype=torch.int64, device=cache.device)
        self._copied = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def max_tokens(self) -> int:
        """Of a sequence, as far as its block table reaches."""
        return self._host_tables.shape[1] * self._cache.block_size

    def view(self, rows: int) -> tuple[Tensor, Tensor, DecodeBatch]:  # token ids and positions [rows]
        token_ids, positions, slots, context_lens = self._device[:, :rows]
        return (
            token_ids,
            positions,
            DecodeBatch(slots, context_lens, self._device_tables[:rows], self._cache.block_size),
        )

    def fill(self, chunks: Sequence[Chunk], rows: int) -> None:
        """Put the chunks into the first rows, and a token of nobody's into those up to `rows`."""
        if self._copied is not None:
            self._copied.synchronize()  # the host's side is still being read until then
        block_size, spare = self._cache.block_size, self._cache.spare_block
        numbers, tables = self._host.numpy(), self._host_tables.numpy()
        widest = 1
        for row, chunk in enumerate(chunks):
            used = chunk.start // block_size + 1
            assert len(chunk.blocks) >= used, f"{len(chunk.blocks)} blocks for {chunk.start + 1} tokens"
            slot = chunk.blocks[used - 1] * block_size + chunk.start % block_size
            numbers[:, row] = chunk.token_ids[0], chunk.start, slot, chunk.start + 1
            tables[row, :used] = chunk.blocks[:used]
            widest = max(widest, used)
        numbers[:, len(chunks) : rows] = [[0], [0], [spare * block_size], [1]]
        tables[len(chunks) : rows, 0] = spare
        self._device[:, :rows].copy_(self._host[:, :rows], non_blocking=True)
        self._device_tables[:rows, :widest].copy_(self._host_tables[:rows, :widest], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class DecodeGraphs:
    """A runner's decode steps of `sizes` rows (ascending), ready to be replayed."""

    def __init__(self, runner: Runner, sizes: Sequence[int], max_model_len: int, capture: Capture) -> None:
        """Runs and captures every size. Raises RuntimeError where the model's step cannot be captured."""
        started = time.monotonic()
        cache = runner.cache
        self._runner = runner
        self._sizes = list(sizes)
        self._inputs = DecodeInputs(self._sizes[-1], -(-max_model_len // cache.block_size), cache)
        shape = (self._sizes[-1], runner.model.vocab_size)
        self._logits = torch.zeros(shape, dtype=torch.float32, device=cache.device)
        self._inputs.fill([], self._sizes[-1])
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into the memory it took
            self._replays[size] = capture(partial(self._step, size))
            log.info("captured the decode step of %d rows (%d of %d)", size, len(self._replays), len(self._sizes))
        log.info("captured %d decode steps in %.1f s", len(self._sizes), time.monotonic() - started)

    @torch.inference_mode()
    def _step(self, rows: int) -> None:
        self._logits[:rows].copy_(self._runner.decode_step(*self._inputs.view(rows)))

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether these chunks are a decode step that was captured."""
        return len(chunks) <= self._sizes[-1] and all(
            len(chunk.token_ids) == 1 and chunk.sample and not chunk.targets and chunk.start < self._inputs.max_tokens
            for chunk in chunks
        )

    def run(self, chunks: Sequence[Chunk]) -> Tensor:  # [chunks, vocab] float32, overwritten by the next run
        """What `Runner.forward` does with these chunks. `on_layer` is called when all layers have run."""
        rows = self._sizes[bisect_left(self._sizes, len(chunks))]
        self._inputs.fill(chunks, rows)
        self._replays[rows]()
        for layer in range(self._runner.cache.layout.num_layers):
            self._runner.on_layer(layer)
        return self._logits[: len(chunks)]


def capture_decode_steps(runner: Runner, pool: BlockPool, max_rows: int, capture: Capture) -> DecodeGraphs | None:
    """Every size up to `max_rows`, after a look that a replay says what the runner does; None, with the reason logged,
    for a model that cannot be captured. The pool is idle.
    """
    blocks = pool.allocate(1)
    chunk = Chunk([1], 0, blocks, True)  # token 0 is often the padding, whose embedding is zero
    try:
        expected = runner.forward([chunk])
        graphs = DecodeGraphs(
            runner, ladder(max_rows), min(runner.model.max_model_len, pool.num_blocks * pool.block_size), capture
        )
        difference = (graphs.run([chunk]) - expected).abs().max().item()
        allowed = TOLERANCE[runner.model.module.dtype] * expected.std().item()
    except RuntimeError as error:  # what CUDA says of a step that looks at its numbers on the host, or has no room
        log.warning("decode runs without CUDA graphs: %s", " ".join(str(error).split())[:MAX_REASON_CHARS])
        return None
    finally:
        pool.release(blocks)
    if not difference <= allowed:
        log.warning("decode runs without CUDA graphs: replayed logits differ by %.2g", difference)
        return None
    return graphs
