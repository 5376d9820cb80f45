"""`--quantization`: every linear of a loaded float32 model on weights in int8 or int4; its head always in int8.

What is no `nn.Linear` stays as it is: embeddings (also those that share the head's weight, which only the head then has
twice), norms, routers and the stacked experts of a mixture.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.decoder_layer import DecoderLayer, GatedMLP, Projection
from ..kernels.library import native
from ..kernels.pages import Pages
from ..kernels.quantized import PackedWeight, Quantization, QuantizedWeight, product_by_definition, quantize
from ..transfer.errors import ConfigError
from .fused import FusedLayer, NativeLinear

log = logging.getLogger(__name__)

WeightFormat = Literal["int8", "int4", "fp8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

HEAD_KIND: Quantization = "int8"  # also beside int4 layers, whose loss would otherwise be mostly the head's


class QuantizedLinear(nn.Module):
    """`nn.Linear` with another weight; its bias is the original's."""

    def __init__(self, original: nn.Linear, kind: Quantization, pages: Pages) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.bias = original.bias
        library = native()
        weight = quantize(original.weight, kind)
        self._weight: PackedWeight | QuantizedWeight = (
            weight if library is None else PackedWeight(weight, library, pages)
        )

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self._weight, PackedWeight):
            return self._weight.product(input, self.bias)
        y = product_by_definition(input.reshape(-1, self.in_features), self._weight)
        return (y if self.bias is None else y + self.bias).view(*input.shape[:-1], self.out_features)


def require_quantizable(kind: WeightFormat | None, device: torch.device, dtype: str) -> None:
    """Raise ConfigError, before anything is loaded, where there are no kernels for it."""
    if kind is None or device.type == "cuda":  # there torchao says what it can do
        return
    if kind == "fp8":
        raise ConfigError("--quantization fp8 works on a GPU only (--device cuda)")
    if dtype != "float32":
        raise ConfigError(f"--quantization {kind} starts from float32, not from --dtype {dtype}")


@torch.no_grad()
def quantize_linears(module: PreTrainedModel, kind: Quantization) -> None:
    """Replace the weights of every linear; float32 ones are gone afterwards, unless an embedding shares them."""
    before, pages = _megabytes(module), Pages()
    layers = [child for child in module.modules() if isinstance(child, FusedLayer)]
    for layer in layers:
        _quantize_layer(layer, kind, pages)
    untyped: Any = module
    head = untyped.get_output_embeddings()
    linears = [(name, child) for name, child in module.named_modules() if type(child) in (nn.Linear, NativeLinear)]
    for name, child in linears:
        assert isinstance(child, nn.Linear)
        module.set_submodule(name, QuantizedLinear(child, HEAD_KIND if child is head else kind, pages))
    log.info(
        "weights in %s: %d layers and %d linears outside of them; %.0f of %.0f MB stay float32",
        kind, len(layers), len(linears), _megabytes(module), before,
    )  # fmt: skip


def _quantize_layer(fused: FusedLayer, kind: Quantization, pages: Pages) -> None:
    library = native()
    assert library is not None, "a layer was fused without kernels"
    assert isinstance(fused.layer, DecoderLayer)
    weights = fused.layer.weights

    def packed(part: Projection) -> Projection:
        assert isinstance(part.weight, Tensor)
        return Projection(PackedWeight(quantize(part.weight, kind), library, pages), part.bias)

    mlp = weights.mlp and GatedMLP(packed(weights.mlp.gate), packed(weights.mlp.up), packed(weights.mlp.down))
    ours = replace(weights, q=packed(weights.q), k=packed(weights.k), v=packed(weights.v), o=packed(weights.o), mlp=mlp)
    fused.take(DecoderLayer(ours, library))


def _megabytes(module: nn.Module) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 1e6
