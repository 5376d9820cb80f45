"""A step straight through a model whose layers are all ours: embeddings, layers, norm, head, and nothing in between.

What transformers does on its way from one layer to the next takes as long as a third of a decode step with int8
weights. That there is nothing else a list of parts cannot show (scaled embeddings or logits, layers with positions of
their own), but numbers do: `Runner.warm_up` compares the bits of both ways, and keeps to the model's where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.attention import AttentionBatch
from ..kernels.attention_native import PagedLayer
from ..kernels.decoder_layer import DecoderLayer, LayerStack, Scratch
from .fused import FusedLayer
from .head import decoder_of
from .hook import AttentionCall

DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
AT_ONCE_S = 0.002  # how long one call may take: `on_layer` is not called meanwhile


class StraightModel:
    """One model over one cache."""

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module,
        layers: Sequence[DecoderLayer],
        caches: Sequence[PagedLayer],
    ) -> None:
        self._embed, self._norm, self._rotary = (
            decoder.get_submodule(name) for name in ("embed_tokens", "norm", "rotary_emb")
        )
        self._head = head
        self._layers = layers
        self._caches = caches
        self._stack = LayerStack(layers, caches, caches[0].library)
        self._scratch = Scratch()

    def logits(
        self,
        batch: AttentionBatch,
        input_ids: Tensor,  # [1, num_tokens]
        positions: Tensor,  # [1, num_tokens]
        wanted: Tensor,  # [rows]: the places in the flattened batch whose logits are wanted
        on_layer: Callable[[int], None],  # see `Runner`
    ) -> Tensor:  # [rows, vocab]
        hidden: Tensor = self._embed(input_ids)
        cos, sin = (part.contiguous() for part in self._rotary(hidden, positions))
        self._run_layers(batch, hidden, cos, sin, on_layer)
        normed: Tensor = self._norm(hidden)
        logits: Tensor = self._head(normed[0] if len(wanted) == normed.shape[1] else normed[0, wanted])
        return logits

    def _run_layers(
        self, batch: AttentionBatch, hidden: Tensor, cos: Tensor, sin: Tensor, on_layer: Callable[[int], None]
    ) -> None:
        """The first layer tells how long one takes, and so how many go into a call."""
        step, slots = batch.native_step(), batch.slots
        first, count = 0, 1
        while first < len(self._layers):
            started = time.monotonic()
            if count == 1:
                layer, cache = self._layers[first], self._caches[first]
                layer.begin(cache, slots, hidden, cos, sin, self._scratch)
                on_layer(first)
                layer.end(cache, step, hidden, self._scratch)
            else:
                self._stack.run(first, count, step, slots, hidden, cos, sin, self._scratch)
                for done in range(first, first + count):
                    on_layer(done)
            first += count
            layer_s = (time.monotonic() - started) / count
            count = max(1, min(len(self._layers) - first, int(AT_ONCE_S / max(layer_s, 1e-6))))


def straight_model(
    module: PreTrainedModel, cache_of: Callable[[int, AttentionCall], PagedLayer | None]
) -> StraightModel | None:
    """None where a step takes more than that. `cache_of`: of a layer, by number and what it asks of attention."""
    untyped: Any = module
    decoder, head = decoder_of(module), untyped.get_output_embeddings()
    parts = dict(decoder.named_children())
    if parts.keys() != DECODER_PARTS or not isinstance(head, nn.Module) or set(module.children()) != {decoder, head}:
        return None
    layers: list[DecoderLayer] = []
    caches: list[PagedLayer] = []
    for number, fused in enumerate(parts["layers"].children()):
        if not isinstance(fused, FusedLayer) or (whole := fused.whole) is None:
            return None
        cache = cache_of(number, fused.attention)
        if cache is None or (layers and whole.size != layers[0].size):
            return None
        layers.append(whole)
        caches.append(cache)
    return StraightModel(decoder, head, layers, caches) if layers else None
