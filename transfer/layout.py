"""`KVLayout`: what two workers must agree on before a single byte of KV moves between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .errors import LayoutMismatch

LAYOUT_VERSION = 2

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # float32

Small = Annotated[int, Field(ge=1, le=1 << 16)]


Weights = Literal["none", "int8", "int4", "torchao int8", "torchao int4", "torchao fp8"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of one layer's KV: K is [tokens, kv_heads, k_head_dim], V is [tokens, kv_heads, v_head_dim]."""

    kv_heads: Small
    k_head_dim: Small
    v_head_dim: Small


@dataclass(frozen=True)
class KVLayout:
    """The canonical wire layout: per layer, all of K then all of V, contiguous, in `dtype`.

    int8 has two more planes behind them: a float32 scale for each token and KV head, of K and of V.

    Block sizes are deliberately absent: each side cuts the token axis as it likes.
    """

    fingerprint: Annotated[str, Field(min_length=1, max_length=128)]
    dtype: Annotated[str, Field(pattern="^(float32|float16|bfloat16|int8)$")]
    layers: Annotated[tuple[LayerShape, ...], Field(min_length=1, max_length=1024)]
    # Of the weights, and by whom: other ones give other KV.
    quantization: Weights = "none"
    version: int = LAYOUT_VERSION

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def token_bytes(self, layer: int) -> tuple[int, ...]:
        """Bytes of one token in each plane of a layer, in the order of a slab."""
        shape, item = self.layers[layer], DTYPE_BYTES[self.dtype]
        scales = (shape.kv_heads * SCALE_BYTES,) * 2 if self.dtype == "int8" else ()
        return (shape.kv_heads * shape.k_head_dim * item, shape.kv_heads * shape.v_head_dim * item, *scales)

    @cached_property
    def _bytes_before(self) -> list[int]:
        """Of a token, in the layers before each, and in all."""
        per_layer = (sum(self.token_bytes(layer)) for layer in range(self.num_layers))
        return list(accumulate(per_layer, initial=0))

    def layer_bytes_per_token(self, layer: int) -> int:
        return self._bytes_before[layer + 1] - self._bytes_before[layer]

    def bytes_per_token_of(self, layers: range) -> int:
        return self._bytes_before[layers.stop] - self._bytes_before[layers.start]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV for one token over all layers."""
        return self._bytes_before[-1]

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
