"""Weights of a loaded model replaced by packed ones: of every `nn.Linear`, and of fused layers.

What is no `nn.Linear` stays as it is: embeddings (also those that share the head's weight, which only the head then has
twice), norms, routers and the stacked experts of a mixture.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.decoder_layer import DecoderLayer, GatedMLP, PackedProjection, Projection
from ..kernels.library import native
from ..kernels.pages import Pages
from ..kernels.strips import Form, StripWeight
from .fused import FusedLayer

log = logging.getLogger(__name__)


class Weight(Protocol):
    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


class PackedLinear(nn.Module):
    """`nn.Linear` with another weight; its bias is the original's."""

    def __init__(self, original: nn.Linear, weight: Weight) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.bias = original.bias
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.product(input, self.bias)


def pack_floats(module: PreTrainedModel, at_least: Form | None = None) -> None:
    """Keep float32 weights on the CPU in as few bytes as their numbers need; nothing without kernels in C.

    `at_least`: in no shorter form, for comparison.
    """
    library = native() if module.dtype == torch.float32 and module.device.type == "cpu" else None
    if library is None:
        return
    forms: Counter[str] = Counter()
    pages = Pages()

    def pack(weight: Tensor) -> StripWeight:
        packed = StripWeight(weight, library, pages, at_least)
        forms[packed.form] += packed.nbytes
        return packed

    replace_layers(module, pack)
    replace_linears(module, lambda weight, of_head: pack(weight))
    log.info("weights kept as %s", ", ".join(f"{form} ({size / 1e6:.0f} MB)" for form, size in forms.items()))


@torch.no_grad()
def replace_layers(module: PreTrainedModel, pack: Callable[[Tensor], PackedProjection]) -> None:
    """Pack the weights of fused layers, which let go of the originals one by one."""
    for child in list(module.modules()):
        if isinstance(child, FusedLayer):
            _pack_layer(child, pack)


@torch.no_grad()
def replace_linears(module: PreTrainedModel, pack: Callable[[Tensor, bool], Weight]) -> None:
    """Pack the weights of linears outside of fused layers; `pack` hears whether one makes the logits."""
    untyped: Any = module
    head = untyped.get_output_embeddings()
    for name, child in list(module.named_modules()):
        if type(child) is nn.Linear:
            module.set_submodule(name, PackedLinear(child, pack(child.weight, child is head)))


def _pack_layer(fused: FusedLayer, pack: Callable[[Tensor], PackedProjection]) -> None:
    library = native()
    assert library is not None, "a layer was fused without kernels"
    assert isinstance(fused.layer, DecoderLayer)
    weights = fused.layer.weights

    def packed(part: Projection) -> Projection:
        assert isinstance(part.weight, Tensor)
        return Projection(pack(part.weight), part.bias)

    mlp = weights.mlp and GatedMLP(packed(weights.mlp.gate), packed(weights.mlp.up), packed(weights.mlp.down))
    ours = replace(weights, q=packed(weights.q), k=packed(weights.k), v=packed(weights.v), o=packed(weights.o), mlp=mlp)
    fused.take(DecoderLayer(ours, library))
