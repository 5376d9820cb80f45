"""A pre-norm decoder layer around its attention (`native/layer.c`): norms, projections, rotary positions, gated MLP."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_native import NativeStep, PagedLayer
from .quantized import CProjection, PackedWeight, scratch_bytes
from .strips import StripWeight

ROWS = 32  # the kind of a weight that is not packed, in native/linear.h

PackedProjection = StripWeight | PackedWeight


@dataclass(frozen=True)
class Norm:
    """weight * x / sqrt(mean(x²) + eps), over every run of as many values as the weight has."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Projection:
    weight: Tensor | PackedProjection  # [out, in]
    bias: Tensor | None  # [out]

    @property
    def shape(self) -> tuple[int, int]:
        outs, k = self.weight.shape
        return outs, k

    def for_c(self) -> CProjection:
        if not isinstance(self.weight, Tensor):
            return self.weight.projection(_address(self.bias))
        outs, k = self.shape
        return CProjection(kind=ROWS, outs=outs, k=k, data=_address(self.weight), bias=_address(self.bias))


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class LayerWeights:
    """float32, on the CPU, contiguous: the model's own tensors, which must outlive their use here; or packed."""

    head_dim: int
    input_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    o: Projection
    post_norm: Norm
    mlp: GatedMLP | None  # None: the caller has another kind

    @property
    def projections(self) -> dict[str, Projection]:
        own = {} if self.mlp is None else {"gate": self.mlp.gate, "up": self.mlp.up, "down": self.mlp.down}
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o, **own}


_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


class _CLayer(ctypes.Structure):
    """`Layer` of native/layer.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner")),
        *((name, ctypes.c_int64) for name in ("q_norm_size", "k_norm_size")),
        *((name, ctypes.c_float) for name in ("input_eps", "post_eps", "q_eps", "k_eps")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, CProjection) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    )


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32, tensor.dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _c_layer(weights: LayerWeights) -> _CLayer:
    layer = _CLayer(
        hidden=weights.q.shape[1],
        heads=weights.q.shape[0] // weights.head_dim,
        kv_heads=weights.k.shape[0] // weights.head_dim,
        head_dim=weights.head_dim,
        inner=0 if weights.mlp is None else weights.mlp.gate.shape[0],
    )
    for name, norm in (
        ("input", weights.input_norm), ("post", weights.post_norm), ("q", weights.q_norm), ("k", weights.k_norm)
    ):  # fmt: skip
        if norm is not None:
            setattr(layer, f"{name}_norm", _address(norm.weight))
            setattr(layer, f"{name}_eps", norm.eps)
    layer.q_norm_size = 0 if weights.q_norm is None else weights.q_norm.weight.numel()
    layer.k_norm_size = 0 if weights.k_norm is None else weights.k_norm.weight.numel()
    for name, projection in weights.projections.items():
        setattr(layer, name, projection.for_c())
    return layer


class Scratch:
    """Memory that layers use one after another, so that it stays in the processor's cache."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def rooms(self, rows: int, layer: _CLayer, quantized_inputs: int) -> tuple[int, int, int, int, int | None]:
        """Addresses of qkv, attended, normed, inner and bytes of native/paged.c. The last is None without a width."""
        width = layer.heads * layer.head_dim
        floats = width + 2 * layer.kv_heads * layer.head_dim, max(width, layer.hidden), layer.hidden, 2 * layer.inner
        num_bytes = 4 * rows * sum(floats) + (scratch_bytes(rows, quantized_inputs) if quantized_inputs else 0)
        if self._memory.shape[0] < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        first = self._memory.data_ptr()
        second = first + 4 * rows * floats[0]
        third = second + 4 * rows * floats[1]
        fourth = third + 4 * rows * floats[2]
        return first, second, third, fourth, fourth + 4 * rows * floats[3] if quantized_inputs else None


class DecoderLayer:
    """One layer, ready to be called. A row's bits do not depend on the other rows."""

    def __init__(self, weights: LayerWeights, library: ctypes.CDLL) -> None:
        self.weights = weights
        self._library = library
        self._layer = _c_layer(weights)
        self.pointer = ctypes.addressof(self._layer)
        self._heads, self._kv_heads, self._hidden = self._layer.heads, self._layer.kv_heads, self._layer.hidden
        self._inner = self._layer.inner
        quantized = [part.shape[1] for part in weights.projections.values() if isinstance(part.weight, PackedWeight)]
        self._most_inputs = max(quantized, default=0)  # of a quantised weight

    @property
    def size(self) -> tuple[int, ...]:
        """Layers for which it is the same need the same scratch."""
        return self._hidden, self._heads, self._kv_heads, self.weights.head_dim, self._inner, self._most_inputs

    def rooms(self, rows: int, scratch: Scratch) -> tuple[int, int, int, int, int | None]:
        """See `Scratch.rooms`."""
        return scratch.rooms(rows, self._layer, self._most_inputs)

    def _bytes(self, rows: int) -> Tensor | None:
        """Room for quantised rows, where there are quantised weights."""
        return torch.empty(scratch_bytes(rows, self._most_inputs), dtype=torch.uint8) if self._most_inputs else None

    def attention_inputs(
        self,
        hidden: Tensor,  # [rows, hidden] contiguous
        cos: Tensor,  # [rows, rotary dims] contiguous, halves alike
        sin: Tensor,  # the same
    ) -> tuple[Tensor, Tensor, Tensor]:  # [rows, heads, head_dim] and twice [rows, kv_heads, head_dim]: views of one
        rows, head_dim = len(hidden), self.weights.head_dim
        heads, kv_heads = self._heads, self._kv_heads
        qkv = hidden.new_empty(rows, heads + 2 * kv_heads, head_dim)
        scratch, room = torch.empty_like(hidden), self._bytes(rows)
        self._library.pd_attention_inputs(
            self.pointer, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], qkv.data_ptr(),
            scratch.data_ptr(), None if room is None else room.data_ptr(), rows,
        )  # fmt: skip
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def attention_outputs(
        self,
        attended: Tensor,  # [rows, heads, head_dim] contiguous
        hidden: Tensor,  # [rows, hidden] contiguous: the layer's input
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden]: input + o(attended), and its norm
        total, normed, room = torch.empty_like(hidden), torch.empty_like(hidden), self._bytes(len(hidden))
        self._library.pd_attention_outputs(
            self.pointer, attended.data_ptr(), hidden.data_ptr(), total.data_ptr(), normed.data_ptr(),
            None if room is None else room.data_ptr(), len(hidden),
        )  # fmt: skip
        return total, normed

    def begin(
        self,
        layer: PagedLayer,
        slots: Tensor,  # [rows] int64
        hidden: Tensor,  # [.., rows, hidden] contiguous
        cos: Tensor,  # [.., rows, rotary dims] contiguous, halves alike
        sin: Tensor,  # the same
        scratch: Scratch,
    ) -> None:
        """Up to having K and V in the cache. `end` must follow, with the same scratch."""
        rows = slots.shape[0]
        qkv, attended, _, _, room = self.rooms(rows, scratch)
        self._library.pd_begin_layer(
            self.pointer, layer.pointer, slots.data_ptr(), hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            cos.shape[-1], qkv, attended, room, rows,
        )  # fmt: skip

    def end(self, layer: PagedLayer, step: NativeStep, hidden: Tensor, scratch: Scratch) -> None:
        """Attention and everything behind it: `hidden`, as given to `begin`, becomes the layer's output."""
        rows = hidden.shape[-2]
        self._library.pd_end_layer(
            self.pointer, layer.pointer, step.pointer, *self.rooms(rows, scratch), hidden.data_ptr(), rows
        )

    def add_mlp(
        self,
        normed: Tensor,  # [rows, hidden] contiguous
        total: Tensor,  # [rows, hidden] contiguous: the MLP of `normed` is added to it
    ) -> None:
        scratch, room = normed.new_empty(2 * len(normed), self._inner), self._bytes(len(normed))
        self._library.pd_gated_mlp(
            self.pointer, normed.data_ptr(), total.data_ptr(), scratch.data_ptr(),
            None if room is None else room.data_ptr(), len(normed),
        )  # fmt: skip


class LayerStack:
    """Layers of one size, each with its caches: any number of them in one call."""

    def __init__(self, layers: Sequence[DecoderLayer], caches: Sequence[PagedLayer], library: ctypes.CDLL) -> None:
        assert all(layer.size == layers[0].size for layer in layers), "layers of several sizes"
        self._first = layers[0]
        self._library = library
        self._kept = layers, caches
        self._weights = (ctypes.c_void_p * len(layers))(*(layer.pointer for layer in layers))
        self._caches = (ctypes.c_void_p * len(layers))(*(cache.pointer for cache in caches))

    def run(
        self,
        first: int,
        count: int,
        step: NativeStep,
        slots: Tensor,  # [rows] int64
        hidden: Tensor,  # [.., rows, hidden] contiguous: becomes what the last of them makes of it
        cos: Tensor,  # [.., rows, rotary dims] contiguous, halves alike
        sin: Tensor,  # the same
        scratch: Scratch,
    ) -> None:
        rows = slots.shape[0]
        self._library.pd_run_layers(
            ctypes.addressof(self._weights) + first * _POINTER_BYTES,
            ctypes.addressof(self._caches) + first * _POINTER_BYTES,
            count, step.pointer, slots.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[-1],
            *self._first.rooms(rows, scratch), hidden.data_ptr(), rows,
        )  # fmt: skip
