"""`--quantization`: every linear of a loaded float32 model on weights in int8 or int4; its head always in int8."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.library import native
from ..kernels.pages import Pages
from ..kernels.quantized import PackedWeight, Quantization, QuantizedWeight, quantize
from ..transfer.errors import ConfigError
from .packed import replace_layers, replace_linears

log = logging.getLogger(__name__)

WeightFormat = Literal["int8", "int4", "fp8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

HEAD_KIND: Quantization = "int8"  # also beside int4 layers, whose loss would otherwise be mostly the head's


def require_quantizable(kind: WeightFormat | None, device: torch.device, dtype: str) -> None:
    """Raise ConfigError, before anything is loaded, where there are no kernels for it."""
    if kind is None or device.type == "cuda":  # there torchao says what it can do
        return
    if kind == "fp8":
        raise ConfigError("--quantization fp8 works on a GPU only (--device cuda)")
    if dtype != "float32":
        raise ConfigError(f"--quantization {kind} starts from float32, not from --dtype {dtype}")


def quantize_linears(module: PreTrainedModel, kind: Quantization) -> None:
    """Replace the weights of every linear; float32 ones are gone afterwards, unless an embedding shares them."""
    before, library, pages = _megabytes(module), native(), Pages()

    def pack(weight: Tensor) -> PackedWeight:
        assert library is not None, "a layer was fused without kernels"
        return PackedWeight(quantize(weight, kind), library, pages)

    def pack_linear(weight: Tensor, of_head: bool) -> PackedWeight | QuantizedWeight:
        quantized = quantize(weight, HEAD_KIND if of_head else kind)
        return quantized if library is None else PackedWeight(quantized, library, pages)

    replace_layers(module, pack)
    replace_linears(module, pack_linear)
    log.info("weights in %s; %.0f of %.0f MB stay float32", kind, _megabytes(module), before)


def _megabytes(module: nn.Module) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 1e6
