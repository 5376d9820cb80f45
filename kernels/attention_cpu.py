"""Paged attention for the CPU: in C where that can run (attention_native), else in torch, for one thread.

In torch: gather a sequence's blocks, then batched matrix products over its KV heads. Sequences are computed one
by one, so a sequence's bits cannot depend on its neighbours, and none pays for the length of another. Gathering into a
buffer that all sequences and layers reuse keeps it in cache: for 16 sequences of 500 tokens (SmolLM2, one core) that
and two `bmm` took 2.3 ms a layer, fresh buffers 2.8, and with them `scaled_dot_product_attention` 5.9. What does not
change between layers is worked out once a step: with so little arithmetic in a token, slicing and reshaping would cost
as much.

It is plain torch, so it also runs (slowly) on any other device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention_native import NativeStep, attend_in_c, library_for, native_step, paged_layer
from .kv_int8 import Scales, dequantise

# A tile's scores should stay in L2 while softmax and the second product read them again.
TILE_SCORES = 1 << 19
MIN_TILE_ROWS = 8


@dataclass(frozen=True)
class _SequencePlan:
    """One sequence of a step: which blocks it reads, and where in the shared buffers they are then found."""

    start: int  # of its tokens in the flattened batch
    query_len: int
    blocks: Tensor  # [blocks] int64: those with visible tokens
    k_buffer: Tensor  # [blocks, block_size, kv_heads, k_head_dim]
    v_buffer: Tensor  # [blocks, block_size, kv_heads, v_head_dim]
    key: Tensor  # [kv_heads, k_head_dim, keys], a view of k_buffer: exactly the tokens that exist and may be seen
    value: Tensor  # [kv_heads, keys, v_head_dim], a view of v_buffer


@dataclass
class Workspace:
    """What the layers of one step share. A new step needs a new one."""

    buffers: dict[tuple[str, torch.Size], Tensor] = field(default_factory=dict)
    plans: dict[tuple[int | None, torch.Size, torch.Size], list[_SequencePlan]] = field(default_factory=dict)
    native: NativeStep | None = None
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def buffer(self, name: str, cache: Tensor, num_blocks: int) -> Tensor:
        """Room for `num_blocks` blocks of caches shaped like this one; the same memory on every call."""
        key = (name, cache.shape)
        if key not in self.buffers:
            self.buffers[key] = torch.empty(num_blocks, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        return self.buffers[key]

    def hidden(self, rows: int, keys: int, furthest_back: int, device: torch.device) -> Tensor:  # [rows, keys] bool
        """True where a tile may not look, the last key being the last row's own position.

        Row r sees the keys up to keys - rows + r, no further back from there than `furthest_back`.
        """
        key = (rows, keys, furthest_back)
        if key not in self.masks:
            distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)[None, :]
            self.masks[key] = ((distance < 0) | (distance > furthest_back)).to(device)
        return self.masks[key]


def attend_on_cpu(
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] int64
    workspace: Workspace,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
    scales: Scales | None = None,  # of int8 caches
    of_prompts: Sequence[int | None] = (),
    in_c: bool = True,
) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """The contract of `paged_attention`. `in_c`: where the kernels in C can run, let them."""
    library = library_for(q, k_cache, v_cache) if in_c else None
    if library is not None:
        if workspace.native is None:
            workspace.native = native_step(query_lens, context_lens, block_tables, of_prompts)
        layer = paged_layer(
            library, q.shape[1], k_cache, v_cache, scales, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        return attend_in_c(layer, workspace.native, q, v_cache.shape[3])
    if scales is not None:  # the blocks of this step as floats, in a small cache of their own
        used, block_tables = torch.unique(block_tables, return_inverse=True)
        k_cache, v_cache = (
            dequantise(cache[used], plane[used]) for cache, plane in zip((k_cache, v_cache), scales, strict=True)
        )
    num_tokens, heads, k_head_dim = q.shape
    kv_heads, v_head_dim = v_cache.shape[2:]
    group = heads // kv_heads
    output = q.new_empty(num_tokens, kv_heads, group, v_head_dim)
    scaled = (q * scale).reshape(num_tokens, kv_heads, group, k_head_dim)
    plan_key = (window, k_cache.shape, v_cache.shape)
    if plan_key not in workspace.plans:
        workspace.plans[plan_key] = _plan(k_cache, v_cache, query_lens, context_lens, block_tables, workspace, window)
    for plan in workspace.plans[plan_key]:
        torch.index_select(k_cache, 0, plan.blocks, out=plan.k_buffer)
        torch.index_select(v_cache, 0, plan.blocks, out=plan.v_buffer)
        if plan.query_len == 1:
            scores = _scores(scaled[plan.start], plan.key, softcap)
            torch.bmm(_probabilities(scores, sinks), plan.value, out=output[plan.start])
            continue
        end = plan.start + plan.query_len
        rows = max(MIN_TILE_ROWS, TILE_SCORES // (heads * plan.key.shape[2]))
        for first in range(plan.start, end, rows):
            last = min(first + rows, end)
            keys = plan.key.shape[2] - (end - last)  # up to the tile's last row
            output[first:last] = _attend_tile(
                scaled[first:last], plan.key[..., :keys], plan.value[:, :keys], workspace, window, softcap, sinks
            )
    return output.view(num_tokens, heads, v_head_dim)


def attend_decode_on_cpu(
    q: Tensor,  # [rows, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    *,
    context_lens: Tensor,  # [rows] int64
    block_tables: Tensor,  # [rows, max_blocks] int64
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [rows, heads, v_head_dim]
    """The contract of `decode_attention`. The lengths are read now, at every call."""
    return attend_on_cpu(
        q, k_cache, v_cache, query_lens=[1] * len(q), context_lens=context_lens.tolist(), block_tables=block_tables,
        workspace=Workspace(), scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def _plan(
    k_cache: Tensor,
    v_cache: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
    workspace: Workspace,
    window: int | None,
) -> list[_SequencePlan]:
    """Where each sequence's visible keys are; the earliest is the first query's window."""
    block_size = k_cache.shape[1]
    k_room = workspace.buffer("k", k_cache, block_tables.shape[1])
    v_room = workspace.buffer("v", v_cache, block_tables.shape[1])
    plans, start = [], 0
    for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
        first_key = 0 if window is None else max(0, context_len - query_len + 1 - window)
        first_block = first_key // block_size
        blocks = table[first_block : (context_len + block_size - 1) // block_size]
        # What lies behind the last token was never written, and before the window it is nobody's business.
        visible = slice(first_key - first_block * block_size, context_len - first_block * block_size)
        k_buffer, v_buffer = k_room[: len(blocks)], v_room[: len(blocks)]
        key = k_buffer.flatten(0, 1)[visible].permute(1, 2, 0)
        value = v_buffer.flatten(0, 1)[visible].transpose(0, 1)
        plans.append(_SequencePlan(start, query_len, blocks, k_buffer, v_buffer, key, value))
        start += query_len
    return plans


def _scores(
    queries: Tensor,  # [kv_heads, group * rows, k_head_dim]
    key: Tensor,  # [kv_heads, k_head_dim, keys]
    softcap: float | None,
) -> Tensor:  # [kv_heads, group * rows, keys]
    scores = torch.bmm(queries, key)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _probabilities(
    scores: Tensor,  # [kv_heads, group * rows, keys], -inf where hidden
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [kv_heads, group * rows, keys]
    keys = scores.shape[2]
    if sinks is not None:
        per_head = sinks.to(scores.dtype).view(scores.shape[0], -1, 1)
        rows = scores.shape[1] // per_head.shape[1]
        scores = torch.cat([scores, per_head.repeat_interleave(rows, dim=1)], dim=2)
    # Half precision has too few bits for a sum over a long context.
    precise = torch.float32 if scores.dtype.itemsize < 4 else scores.dtype
    return torch.softmax(scores, dim=-1, dtype=precise).to(scores.dtype)[..., :keys]


def _attend_tile(
    scaled: Tensor,  # [rows, kv_heads, group, k_head_dim]: consecutive queries of one sequence, times the scale
    key: Tensor,  # [kv_heads, k_head_dim, keys], up to the last row's position
    value: Tensor,  # [kv_heads, keys, v_head_dim]
    workspace: Workspace,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [rows, kv_heads, group, v_head_dim]
    rows, kv_heads, group, k_head_dim = scaled.shape
    keys = key.shape[2]
    scores = _scores(scaled.permute(1, 2, 0, 3).reshape(kv_heads, group * rows, k_head_dim), key, softcap)
    per_row = scores.view(kv_heads, group, rows, keys)
    if window is not None and keys > window:
        per_row.masked_fill_(workspace.hidden(rows, keys, window - 1, scores.device), float("-inf"))
    else:  # only the diagonal's corner is hidden
        corner = workspace.hidden(rows, rows, rows, scores.device)
        per_row[..., keys - rows :].masked_fill_(corner, float("-inf"))
    mixed = torch.bmm(_probabilities(scores, sinks), value)
    return mixed.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3)
