"""How much KV a GPU has room for beside everything else that the worker will ever need at once.

The largest step a worker can be asked for is run, with all that follows it (the sampler's copies of the logits, scores
of a prompt), before the cache is allocated: what the allocator held then is set aside. When the cache and the captured
steps are in place it is run once more, so that memory that is too small shows at start-up and not under load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..transfer.errors import ConfigError
from ..transfer.sampling_params import MAX_LOGPROBS, SamplingParams
from .graphs import Capture, DecodeGraphs, Replay, ladder
from .kv_cache import KVCache
from .logprobs import sampled_logprobs, score_prompts
from .memory import DeviceMemory, readable
from .model import LoadedModel
from .runner import Chunk, Runner
from .sampler import SampleRow, sample

log = logging.getLogger(__name__)

MAX_CHOICES = 128  # of one request, which sample their first tokens in one step
# What a CUDA context with its loaded kernels takes beside the allocator's memory: 400 to 600 MB on recent devices.
CONTEXT_BYTES = 640 << 20

TOKEN = 1  # 0 is often the padding, whose embedding is zero
SAMPLING = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=MAX_LOGPROBS)


@dataclass(frozen=True)
class WorstStep:
    """The most that one step of a worker can be asked for."""

    chunk_tokens: int  # of prompts
    max_rows: int  # single tokens beside them


def run_worst_step(runner: Runner, worst: WorstStep) -> None:
    """Run it, at the end of contexts as long as there may be; all of it reads and writes the spare block."""
    chunks = list(_chunks(runner, worst))
    logits = runner.forward(chunks)
    for _ in score_prompts(runner, chunks, lambda: None):
        pass
    vocab_size = logits.shape[1]
    everything = b"\xff" * -(-vocab_size // 8)
    rows = [SampleRow(SAMPLING, [0], [], choice, everything) for choice in range(len(logits) + MAX_CHOICES - 1)]
    # A worker copies the rows that it samples from, once for each choice.
    picked = logits[[min(row, len(logits) - 1) for row in range(len(rows))]]
    sampled_logprobs(picked, rows, sample(picked, rows, frozenset()))


def _chunks(runner: Runner, worst: WorstStep) -> Iterator[Chunk]:
    longest = runner.model.max_model_len
    blocks = [runner.cache.spare_block] * -(-longest // runner.cache.block_size)
    for _ in range(worst.max_rows):
        yield Chunk([TOKEN], longest - 1, blocks, True)
    left = worst.chunk_tokens
    while left > 0:
        count = min(left, longest)
        tokens = [TOKEN] * count
        yield Chunk(tokens, longest - count, blocks, True, tokens, MAX_LOGPROBS)
        left -= count


@dataclass(frozen=True)
class Need:
    """Bytes to be left free beside weights and KV."""

    step: int
    graphs: int


def measure_need(
    model: LoadedModel, block_size: int, worst: WorstStep, memory: DeviceMemory, capture: Capture | None
) -> Need:
    """Run the worst step, and capture two decode steps, over a cache of one block that is then given back."""
    runner = Runner(model, KVCache(model.layout, 1, block_size, model.module.device))
    run_worst_step(runner, worst)  # what is set up once, such as a library's workspace, is not the step's
    memory.release_unused()
    before = memory.reserved_bytes()
    memory.start_peak()
    run_worst_step(runner, worst)
    step = memory.peak_bytes() - before
    memory.release_unused()
    graphs = 0
    if capture is not None:
        graphs = _graph_bytes(runner, ladder(worst.max_rows), memory, capture)
        memory.release_unused()
    return Need(max(0, step), graphs)


def _graph_bytes(runner: Runner, sizes: list[int], memory: DeviceMemory, capture: Capture) -> int:
    """What all of them will take: the largest, and each further one as much as the second, which shares its memory."""
    free = [memory.free_bytes()]

    def measured(step: Callable[[], None]) -> Replay:
        replay = capture(step)
        free.append(memory.free_bytes())
        return replay

    try:
        graphs = DecodeGraphs(runner, sizes[-2:], runner.model.max_model_len, measured)
    except RuntimeError:
        return 0  # said when they are captured for good
    del graphs
    taken = [max(0, before - after) for before, after in pairwise(free)]
    return taken[0] + sum(taken[1:]) * (len(sizes) - 1)


def kv_room_bytes(memory: DeviceMemory, utilization: float, need: Need) -> int:
    """Bytes for KV, the model being loaded. Raises ConfigError when there are none."""
    total, weights = memory.total_bytes(), memory.reserved_bytes()
    room = min(int(total * utilization) - weights - CONTEXT_BYTES, memory.free_bytes()) - need.step - need.graphs
    log.info(
        "of %s: %s weights, %s for the largest step, %s for captured steps, %s for KV",
        *map(readable, (total, weights, need.step, need.graphs, max(0, room))),
    )
    if room <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g}: of {readable(total)} ({readable(memory.free_bytes())} free), "
            f"{readable(weights)} of weights, {readable(need.step)} for the largest step and {readable(need.graphs)} "
            "for captured steps leave no room for KV; lower --chunk-tokens, --max-sequences or --max-model-len"
        )
    return room


def prove(runner: Runner, worst: WorstStep) -> None:
    """Run the worst step beside all that is allocated by now. Raises ConfigError when that does not fit."""
    try:
        run_worst_step(runner, worst)
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the largest step does not fit beside the KV; lower --gpu-memory-utilization: {reason}"
        ) from None
