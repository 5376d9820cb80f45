"""A pre-norm decoder layer around its attention (`native/layer.c`): norms, projections, rotary positions, gated MLP."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """weight * x / sqrt(mean(x²) + eps), over every run of as many values as the weight has."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Projection:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class LayerWeights:
    """float32, on the CPU, contiguous: the model's own tensors, which must outlive their use here."""

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


class _CLayer(ctypes.Structure):
    """`Layer` of native/layer.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner")),
        *((name, ctypes.c_int64) for name in ("q_norm_size", "k_norm_size")),
        *((name, ctypes.c_float) for name in ("input_eps", "post_eps", "q_eps", "k_eps")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias")),
        *((name, ctypes.c_void_p) for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")),
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
        hidden=weights.q.weight.shape[1],
        heads=len(weights.q.weight) // weights.head_dim,
        kv_heads=len(weights.k.weight) // weights.head_dim,
        head_dim=weights.head_dim,
        inner=0 if weights.mlp is None else len(weights.mlp.gate.weight),
    )
    for name, norm in (
        ("input", weights.input_norm), ("post", weights.post_norm), ("q", weights.q_norm), ("k", weights.k_norm)
    ):  # fmt: skip
        if norm is not None:
            setattr(layer, f"{name}_norm", _address(norm.weight))
            setattr(layer, f"{name}_eps", norm.eps)
    layer.q_norm_size = 0 if weights.q_norm is None else weights.q_norm.weight.numel()
    layer.k_norm_size = 0 if weights.k_norm is None else weights.k_norm.weight.numel()
    projections = {"q": weights.q, "k": weights.k, "v": weights.v, "o": weights.o}
    if weights.mlp is not None:
        projections |= {"gate": weights.mlp.gate, "up": weights.mlp.up, "down": weights.mlp.down}
    for name, projection in projections.items():
        setattr(layer, name, _address(projection.weight))
        setattr(layer, f"{name}_bias", _address(projection.bias))
    return layer


class DecoderLayer:
    """One layer, ready to be called. A row's bits do not depend on the other rows."""

    def __init__(self, weights: LayerWeights, library: ctypes.CDLL) -> None:
        self._weights = weights
        self._library = library
        self._layer = _c_layer(weights)
        self._pointer = ctypes.addressof(self._layer)
        self._heads, self._kv_heads, self._hidden = self._layer.heads, self._layer.kv_heads, self._layer.hidden
        self._inner = self._layer.inner

    def attention_inputs(
        self,
        hidden: Tensor,  # [rows, hidden] contiguous
        cos: Tensor,  # [rows, rotary dims] contiguous, halves alike
        sin: Tensor,  # the same
    ) -> tuple[Tensor, Tensor, Tensor]:  # [rows, heads, head_dim] and twice [rows, kv_heads, head_dim]: views of one
        rows, head_dim = len(hidden), self._weights.head_dim
        heads, kv_heads = self._heads, self._kv_heads
        qkv = hidden.new_empty(rows, heads + 2 * kv_heads, head_dim)
        scratch = torch.empty_like(hidden)
        self._library.pd_attention_inputs(
            self._pointer, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], qkv.data_ptr(),
            scratch.data_ptr(), rows,
        )  # fmt: skip
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def attention_outputs(
        self,
        attended: Tensor,  # [rows, heads, head_dim] contiguous
        hidden: Tensor,  # [rows, hidden] contiguous: the layer's input
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden]: input + o(attended), and its norm
        total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        self._library.pd_attention_outputs(
            self._pointer, attended.data_ptr(), hidden.data_ptr(), total.data_ptr(), normed.data_ptr(), len(hidden)
        )
        return total, normed

    def add_mlp(
        self,
        normed: Tensor,  # [rows, hidden] contiguous
        total: Tensor,  # [rows, hidden] contiguous: the MLP of `normed` is added to it
    ) -> None:
        scratch = normed.new_empty(2 * len(normed), self._inner)
        self._library.pd_gated_mlp(self._pointer, normed.data_ptr(), total.data_ptr(), scratch.data_ptr(), len(normed))
