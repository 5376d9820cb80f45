"""`Runner`: a batch of chunks in, logits out. Both pools drive the model through this and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention import AttentionBatch, DecodeBatch, decode_attention, paged_attention
from ..kernels.attention_native import PagedLayer, library_for, paged_layer
from ..kernels.cache_ops import write_kv
from .block_pool import BlockPool
from .head import Head
from .hook import AttentionCall, PagedCall, install
from .kv_cache import KVCache
from .model import LoadedModel
from .straight import StraightModel, straight_model

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 3  # a prompt's two (attention of several is another kernel than that of one), and one decoded


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to run now."""

    token_ids: Sequence[int]
    start: int  # position of the first of them; the KV of all earlier positions is in `blocks`
    blocks: Sequence[int]  # the sequence's block table, covering at least start + len(token_ids) tokens
    sample: bool  # whether the logits after the last token are wanted
    targets: Sequence[int] = ()  # targets[i] is to be scored behind token i (`logprobs.py`), with its `top` best rivals
    top: int = 0
    of_prompt: int | None = None  # how many of them are the prompt's, see `AttentionBatch`


def _ignore_layer(layer: int) -> None:
    """The default `on_layer`."""


class Runner:
    """Runs one model over one paged cache.

    `on_layer(layer)` is called during `forward` as soon as that layer's KV of the whole step is in the cache, or a
    moment later (`straight.AT_ONCE_S`); what it raises comes out of `forward` unchanged. The runner keeps nothing of an
    aborted step: its tokens may be run again.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, on_layer: Callable[[int], None] = _ignore_layer) -> None:
        assert model.layout == cache.layout, "the cache was built for another model"
        self.model = model
        self.cache = cache
        self.on_layer = on_layer
        self._batch: AttentionBatch | DecodeBatch | None = None
        self._layer = 0
        self._layers: dict[int, PagedLayer] = {}  # as fused layers use them, by number
        self.straight: StraightModel | None = None
        self.head = Head(model.module)
        install(model.module, self)

    def warm_up(self, pool: BlockPool) -> None:
        """Read a prompt of two tokens and decode behind it, before anybody is told that this worker is ready."""
        blocks = pool.allocate(min(pool.blocks_for(WARM_UP_TOKENS), pool.num_blocks))
        room = min(WARM_UP_TOKENS, len(blocks) * pool.block_size)
        prompt = [1, 2][: max(1, room - 1)]  # of two tokens one at least is no padding, whose embedding may be zeros
        chunks = [Chunk(prompt, 0, blocks, True)]
        logits = [self.forward(chunks)]
        if len(prompt) < room:
            chunks.append(Chunk([int(logits[0].argmax())], len(prompt), blocks, True))
            logits.append(self.forward(chunks[1:]))
        self._go_straight(chunks, logits)
        pool.release(blocks)

    def _go_straight(self, chunks: Sequence[Chunk], logits: Sequence[Tensor]) -> None:
        """Run steps straight from now on, if that gives these logits after each of the chunks, to the bit."""
        if self.cache.device.type != "cpu":
            return
        self.straight = straight_model(self.model.module, self._paged_layer)
        if self.straight is None:
            return
        try:
            alike = all(torch.equal(self.forward([chunk]), row) for chunk, row in zip(chunks, logits, strict=True))
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            log.info("%s has layers of ours, but they cannot be run straight: %s", type(self.model.module), error)
            alike = False
        if not alike:
            self.straight = None

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:  # [chunks with sample, vocab] float32
        """Run the chunks as one batch, writing their KV, and return the logits after those that sample, in order.

        Chunks are of different sequences. When one has targets, `head` keeps the step for `score_prompts`.
        Raises whatever `on_layer` raises.
        """
        assert chunks, "a step needs at least one chunk"
        device = self.cache.device
        token_ids: list[int] = []
        positions: list[int] = []
        last_positions: list[int] = []  # within the flattened batch
        for chunk in chunks:
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.start + len(chunk.token_ids))
            if chunk.sample:
                last_positions.append(len(token_ids) - 1)
        input_ids = torch.tensor([token_ids], device=device)
        scoring = any(chunk.targets for chunk in chunks)
        batch = build_batch(chunks, self.cache.block_size, device)
        at = torch.tensor([positions], device=device)
        wanted = torch.tensor(last_positions, dtype=torch.int64, device=device)
        if self.straight is not None and not scoring:
            return self.straight.logits(batch, input_ids, at, wanted, self.on_layer)
        with self.head.keeping(input_ids) if scoring else nullcontext():
            return self._run(batch, input_ids, at, wanted)

    @torch.inference_mode()
    def decode_step(
        self,
        token_ids: Tensor,  # [rows] int64
        positions: Tensor,  # [rows] int64
        batch: DecodeBatch,
    ) -> Tensor:  # [rows, vocab] float32
        """`forward` of one sampled token each, from nothing but tensors, so that it can be captured (`graphs.py`).

        `on_layer` is not called.
        """
        return self._run(batch, token_ids[None], positions[None], torch.arange(len(token_ids), device=token_ids.device))

    def _run(
        self,
        batch: AttentionBatch | DecodeBatch,
        input_ids: Tensor,  # [1, num_tokens]
        positions: Tensor,  # [1, num_tokens]
        wanted: Tensor,  # [rows]: the places in the flattened batch whose logits are wanted
    ) -> Tensor:  # [rows, vocab] float32
        self._batch, self._layer = batch, 0
        try:
            output = self.model.module(
                input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
            )
        finally:
            self._batch = None
        assert self._layer == self.cache.layout.num_layers, "the model skipped a layer's attention"
        logits: Tensor = output.logits[0]
        return logits.float()

    def paged(self, known: AttentionCall) -> PagedCall | None:
        """See `hook.Attention`."""
        batch = self._batch
        if not isinstance(batch, AttentionBatch) or (layer := self._paged_layer(self._layer, known)) is None:
            return None
        return PagedCall(layer, batch.native_step(), batch.slots, self._written)

    def _paged_layer(self, layer: int, known: AttentionCall) -> PagedLayer | None:
        """A layer's caches, and what it asks of attention, as C reads them; None where C cannot."""
        if layer not in self._layers:
            k_cache, v_cache = self.cache.keys[layer], self.cache.values[layer]
            library = library_for(known.q, k_cache, v_cache)
            if library is None:
                return None
            self._layers[layer] = paged_layer(
                library, known.q.shape[1], k_cache, v_cache, self.cache.scales[layer],
                scale=known.scale, window=known.window, softcap=known.softcap, sinks=known.sinks,
            )  # fmt: skip
        return self._layers[layer]

    def _written(self) -> None:
        self._layer += 1
        self.on_layer(self._layer - 1)

    def attend(self, call: AttentionCall) -> Tensor:
        """See `hook.Attention`."""
        batch = self._batch
        assert batch is not None, "attention outside of a step"
        layer = self._layer
        k_cache, v_cache = self.cache.keys[layer], self.cache.values[layer]
        scales = self.cache.scales[layer]
        write_kv(k_cache, v_cache, call.k, call.v, batch.slots, scales)
        self._layer = layer + 1
        if isinstance(batch, DecodeBatch):
            return decode_attention(
                call.q, k_cache, v_cache, batch,
                scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks,
            )  # fmt: skip
        self.on_layer(layer)
        return paged_attention(
            call.q, k_cache, v_cache, batch,
            scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks, scales=scales,
        )  # fmt: skip


def build_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> AttentionBatch:
    """Flatten the chunks: where each token is written, and what each sequence reads."""
    query_lens = [len(chunk.token_ids) for chunk in chunks]
    context_lens = [chunk.start + query_len for chunk, query_len in zip(chunks, query_lens, strict=True)]
    used = [(context_len + block_size - 1) // block_size for context_len in context_lens]
    tables = np.zeros((len(chunks), max(used)), dtype=np.int64)
    slots = np.empty(sum(query_lens), dtype=np.int64)
    at = 0
    for row, (chunk, num_blocks) in enumerate(zip(chunks, used, strict=True)):
        assert query_lens[row] > 0, "an empty chunk"
        assert len(chunk.blocks) >= num_blocks, f"{len(chunk.blocks)} blocks for {context_lens[row]} tokens"
        table = tables[row]
        table[:num_blocks] = np.asarray(chunk.blocks)[:num_blocks]
        positions = np.arange(chunk.start, context_lens[row])
        slots[at : at + query_lens[row]] = table[positions // block_size] * block_size + positions % block_size
        at += query_lens[row]
    return AttentionBatch(
        slots=torch.from_numpy(slots).to(device),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=torch.from_numpy(tables).to(device),
        block_size=block_size,
        of_prompts=[chunk.of_prompt for chunk in chunks],
    )
