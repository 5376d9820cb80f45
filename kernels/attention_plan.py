"""What the layers of one step share on a GPU, prepared once: tensors only, so that no layer waits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

# As in attention_triton_decode, whose PART_KEYS * MIN_PARTS and FEW_SPLITS these are.
SPLIT_KEYS = 512
FEW_SPLITS = 4
PROGRAMS_PER_PROCESSOR = 4  # that run at once


def default_num_splits(device: torch.device, kv_heads: int) -> int:
    """The most splits of one sequence: enough for a single long one to fill the device.

    The bits of a result depend on it, so it depends on nothing that differs between steps.
    """
    return -(-num_programs(device) // kv_heads)


@cache
def num_programs(device: torch.device) -> int:
    """How many programs the device runs at once, about; a few under the interpreter."""
    if device.type != "cuda":
        return 3
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Splits:
    """The list of all splits of a step, for one window."""

    first_splits: Tensor  # [num_seqs + 1] int32: where each sequence's splits begin in the list; then its length
    split_seqs: Tensor  # [max_listed] int32


@dataclass(frozen=True)
class SingleTokens:
    """Sequences with one new token each. All tensors may be those of a CUDA graph, refilled between replays."""

    rows: Tensor  # [num_seqs] int32: each one's row of the flattened batch
    context_lens: Tensor  # [num_seqs] integers, this token included; 0 is padding
    block_tables: Tensor  # [num_seqs, max_blocks] integers
    num_splits: int
    max_listed: int  # no step has more splits in all
    splits: dict[int, Splits] = field(default_factory=dict)  # by window
    partials: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by (heads, v_head_dim)

    def partial(self, heads: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
        """Room for results and sums of all splits; layers run one after the other, so they share it."""
        key = (heads, v_head_dim)
        if key not in self.partials:
            device = self.rows.device
            self.partials[key] = (
                torch.empty(self.max_listed, heads, v_head_dim, dtype=torch.float32, device=device),
                torch.empty(self.max_listed, heads, dtype=torch.float32, device=device),
            )
        return self.partials[key]


def max_splits(context_len: int, num_splits: int) -> int:
    """The most splits of a sequence of this length; its first and last may be short."""
    return min(num_splits, max(FEW_SPLITS, context_len // SPLIT_KEYS + 2))


@dataclass(frozen=True)
class Chunk:
    """Several new tokens of one sequence."""

    sequence: int
    start: int  # row of the flattened batch
    query_len: int
    context_len: int


@dataclass
class GpuPlan:
    """One step: its sequences with a single new token, and the chunks of the others."""

    block_tables: Tensor  # [num_seqs, max_blocks] integers
    singles: SingleTokens | None
    chunks: list[Chunk]
    tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by (rows of a tile, group)

    def tiles_of(self, rows: int, group: int) -> Tensor:  # [num_tiles, 5] int32
        """Every tile of `rows` (token, head of the group) pairs: sequence, start, query_len, context_len, first row."""
        if (rows, group) not in self.tiles:
            tiles = [
                (chunk.sequence, chunk.start, chunk.query_len, chunk.context_len, first)
                for chunk in self.chunks
                for first in range(0, chunk.query_len * group, rows)
            ]
            # Those with most keys first: what is begun last should not be what takes longest.
            tiles.sort(key=lambda tile: tile[3] - tile[2] + tile[4] // group, reverse=True)
            self.tiles[rows, group] = torch.tensor(tiles, dtype=torch.int32).to(self.block_tables.device)
        return self.tiles[rows, group]


def plan_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] integers, on the device
    num_splits: int,
) -> GpuPlan:
    """Sort the sequences of a step; to be done once for all layers."""
    device = block_tables.device
    singles, chunks, rows, start = [], [], [], 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        if query_len == 1:
            singles.append(sequence)
            rows.append(start)
        else:
            chunks.append(Chunk(sequence, start, query_len, context_len))
        start += query_len
    if not singles:
        return GpuPlan(block_tables, None, chunks)
    lens = [context_lens[sequence] for sequence in singles]
    packed = torch.tensor([singles, rows, lens], dtype=torch.int32).to(device)
    single_tokens = SingleTokens(
        rows=packed[1],
        context_lens=packed[2],
        block_tables=block_tables if not chunks else block_tables.index_select(0, packed[0]),
        num_splits=num_splits,
        max_listed=sum(max_splits(length, num_splits) for length in lens),
    )
    return GpuPlan(block_tables, single_tokens, chunks)


def plan_fixed(
    context_lens: Tensor,  # [num_seqs] integers
    block_tables: Tensor,  # [num_seqs, max_blocks] integers
    block_size: int,
    num_splits: int,
) -> GpuPlan:
    """A step of single tokens, whatever lengths the tensors will hold, 0 for padding."""
    num_seqs, max_blocks = block_tables.shape
    rows = torch.arange(num_seqs, dtype=torch.int32, device=block_tables.device)
    max_listed = num_seqs * max_splits(max_blocks * block_size, num_splits)
    return GpuPlan(block_tables, SingleTokens(rows, context_lens, block_tables, num_splits, max_listed), [])
