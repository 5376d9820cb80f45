"""`KVLayout`: what two workers must agree on before a single byte of KV moves between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .errors import LayoutMismatch

LAYOUT_VERSION = 2

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Small = Annotated[int, Field(ge=1, le=1 << 16)]


Weights = Literal["none", "int8", "int4", "torchao int8", "torchao int4", "torchao fp8"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of one layer's KV: K is [tokens, kv_heads, k_head_dim], V is [tokens, kv_heads, v_head_dim]."""

    kv_heads: Small
    k_head_dim: Small
    v_head_dim: Small

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.k_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The canonical wire layout: per layer, all of K then all of V, contiguous, in `dtype`.

    Block sizes are deliberately absent: each side cuts the token axis as it likes.
    """

    fingerprint: Annotated[str, Field(min_length=1, max_length=128)]
    dtype: Annotated[str, Field(pattern="^(float32|float16|bfloat16)$")]
    layers: Annotated[tuple[LayerShape, ...], Field(min_length=1, max_length=1024)]
    # Of the weights, and by whom: other ones give other KV.
    quantization: Weights = "none"
    version: int = LAYOUT_VERSION

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layer_bytes_per_token(self, layer: int) -> int:
        return self.layers[layer].elements_per_token * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV for one token over all layers."""
        return sum(shape.elements_per_token for shape in self.layers) * DTYPE_BYTES[self.dtype]

    def differences(self, other: KVLayout) -> Iterator[str]:
        if self.version != other.version:
            yield f"version {self.version} != {other.version}"
        if self.fingerprint != other.fingerprint:
            yield f"fingerprint {self.fingerprint[:12]} != {other.fingerprint[:12]}"
        if self.dtype != other.dtype:
            yield f"dtype {self.dtype} != {other.dtype}"
        if self.quantization != other.quantization:
            yield f"quantization {self.quantization} != {other.quantization}"
        if self.num_layers != other.num_layers:
            yield f"layers {self.num_layers} != {other.num_layers}"
        elif self.layers != other.layers:
            first = next(i for i, (a, b) in enumerate(zip(self.layers, other.layers, strict=True)) if a != b)
            yield f"layer {first} shape {self.layers[first]} != {other.layers[first]}"

    def require_equal(self, other: KVLayout, mine: str, theirs: str) -> None:
        """Raise LayoutMismatch naming every differing field, if there is one."""
        found = list(self.differences(other))
        if found:
            raise LayoutMismatch(f"KV layouts of {mine} and {theirs} differ: " + "; ".join(found))
