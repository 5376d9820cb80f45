"""Paged attention for one CPU thread: gather a sequence's blocks, then batched matrix products over its KV heads.

Sequences are computed one by one, so a sequence's bits cannot depend on its neighbours, and none pays for the
length of another. Measured on one core (SmolLM2 shapes): gathering into a buffer that stays in cache and two `bmm`
take 2.3 ms a layer for 16 sequences of 500 tokens; fresh buffers take 2.8 ms, with `scaled_dot_product_attention` 5.9.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# A tile's scores should stay in L2 while softmax and the second product read them again.
TILE_SCORES = 1 << 19
MIN_TILE_ROWS = 8


@dataclass
class Workspace:
    """What the layers of one step share: gather buffers, and the masks of a tile's diagonal."""

    buffers: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = field(default_factory=dict)
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def gather(self, name: str, cache: Tensor, blocks: Tensor) -> Tensor:
        """Copy `blocks` of `cache` into the buffer `name`: [len(blocks) * block_size, kv_heads, head_dim]."""
        key = (name, cache.dtype, tuple(cache.shape[1:]))
        buffer = self.buffers.get(key)
        if buffer is None or len(buffer) < len(blocks):
            buffer = self.buffers[key] = torch.empty(len(blocks), *cache.shape[1:], dtype=cache.dtype)
        part = buffer[: len(blocks)]
        torch.index_select(cache, 0, blocks, out=part)
        return part.view(-1, *cache.shape[2:])

    def hidden(self, rows: int, keys: int, first_visible_back: int) -> Tensor:
        """True where a tile may not look: [rows, keys], the last key being the last row's own position.

        Row r sees keys up to keys - rows + r, and not further back than `first_visible_back` from there.
        """
        found = self.masks.get((rows, keys, first_visible_back))
        if found is None:
            distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)[None, :]
            found = (distance < 0) | (distance > first_visible_back)
            self.masks[rows, keys, first_visible_back] = found
        return found


def attend_on_cpu(
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    *,
    query_lens: list[int],
    context_lens: list[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] int64
    workspace: Workspace,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """The contract of `paged_attention`, for CPU tensors."""
    block_size = k_cache.shape[1]
    scaled = q * scale
    output = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    start = 0
    for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
        end = start + query_len
        first_key = 0 if window is None else max(0, context_len - query_len + 1 - window)
        first_block = first_key // block_size
        blocks = table[first_block : (context_len + block_size - 1) // block_size]
        # Cut to the tokens that exist: what lies behind the last one was never written.
        visible = slice(first_key - first_block * block_size, context_len - first_block * block_size)
        key = workspace.gather("k", k_cache, blocks)[visible].permute(1, 2, 0)
        value = workspace.gather("v", v_cache, blocks)[visible].transpose(0, 1)
        rows = max(MIN_TILE_ROWS, TILE_SCORES // (q.shape[1] * key.shape[2]))
        for tile_start in range(start, end, rows):
            tile_end = min(tile_start + rows, end)
            seen = key.shape[2] - (end - tile_end)  # keys up to the tile's last row
            output[tile_start:tile_end] = _attend_tile(
                scaled[tile_start:tile_end], key[..., :seen], value[:, :seen], workspace, window, softcap, sinks
            )
        start = end
    return output


def _attend_tile(
    scaled: Tensor,  # [rows, heads, k_head_dim], consecutive queries of one sequence, times the scale
    key: Tensor,  # [kv_heads, k_head_dim, keys], up to the last row's position
    value: Tensor,  # [kv_heads, keys, v_head_dim]
    workspace: Workspace,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [rows, heads, v_head_dim]
    rows, heads, _ = scaled.shape
    kv_heads, _, keys = key.shape
    group = heads // kv_heads
    grouped = scaled.view(rows, kv_heads, group, -1).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, -1)
    scores = torch.bmm(grouped, key)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    per_row = scores.view(kv_heads, group, rows, keys)
    if window is not None and keys > window:
        per_row.masked_fill_(workspace.hidden(rows, keys, window - 1), float("-inf"))
    elif rows > 1:
        per_row[..., keys - rows :].masked_fill_(workspace.hidden(rows, rows, rows), float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(kv_heads, group, rows, 1)
        scores = torch.cat([per_row, sink], dim=-1).view(kv_heads, group * rows, keys + 1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    probabilities = torch.softmax(scores, dim=-1, dtype=exact).to(scores.dtype)[..., :keys]
    mixed = torch.bmm(probabilities, value)
    return mixed.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)
