"""A pre-norm decoder layer around its attention, for a GPU: q, k, v in one matrix product, gate and up in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .decoder_layer import LayerWeights, Projection
from .rows import gated_rows, normed_rows, turn_heads


class JoinedLayer(nn.Module):
    """The calls of `DecoderLayer`. Its products are plain linears, so a library that quantises linears finds them."""

    def __init__(self, weights: LayerWeights) -> None:
        """The weights given become views of the joined ones: they take no memory of their own any more."""
        super().__init__()
        self.head_dim = weights.head_dim
        self.heads, self.kv_heads = (part.shape[0] // weights.head_dim for part in (weights.q, weights.k))
        self.qkv = _join([weights.q, weights.k, weights.v])
        self.o = _join([weights.o])
        self.gate_up = None if weights.mlp is None else _join([weights.mlp.gate, weights.mlp.up])
        self.down = None if weights.mlp is None else _join([weights.mlp.down])
        self._norms = weights.input_norm, weights.post_norm
        self._head_norms = weights.q_norm, weights.k_norm

    def attention_inputs(
        self,
        hidden: Tensor,  # [rows, hidden] contiguous
        cos: Tensor,  # [rows, rotary dims] contiguous, halves alike
        sin: Tensor,  # the same
    ) -> tuple[Tensor, Tensor, Tensor]:  # [rows, heads, head_dim] and twice [rows, kv_heads, head_dim]: views of one
        qkv = self.qkv(normed_rows(hidden, self._norms[0])).view(len(hidden), -1, self.head_dim)
        turn_heads(qkv, self.heads, self.kv_heads, cos, sin, *self._head_norms)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def attention_outputs(
        self,
        attended: Tensor,  # [rows, heads, head_dim] contiguous
        hidden: Tensor,  # [rows, hidden] contiguous: the layer's input
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden]: input + o(attended), and its norm
        total = hidden + self.o(attended.flatten(1))
        return total, normed_rows(total, self._norms[1])

    def add_mlp(
        self,
        normed: Tensor,  # [rows, hidden] contiguous
        total: Tensor,  # [rows, hidden] contiguous: the MLP of `normed` is added to it
    ) -> None:
        assert self.gate_up is not None, "the layer has an MLP of its own"
        assert self.down is not None
        total += self.down(gated_rows(self.gate_up(normed)))


def _join(parts: Sequence[Projection]) -> nn.Linear:
    """One linear of several, whose weights and biases become views of its own."""
    weights = [part.weight for part in parts]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    assert len(tensors) == len(weights), "a packed weight is joined with nothing"
    whole = _joined(tensors)
    linear = nn.Linear(whole.shape[1], len(whole), bias=False, device="meta")
    linear.weight = nn.Parameter(whole, requires_grad=False)
    if any(part.bias is not None for part in parts):
        biases = [tensors[0].new_zeros(part.shape[0]) if part.bias is None else part.bias for part in parts]
        linear.bias = nn.Parameter(_joined(biases), requires_grad=False)
    return linear


def _joined(parts: Sequence[Tensor]) -> Tensor:  # along the first dimension
    first, *others = parts
    end, adjacent = first.data_ptr() + first.nbytes, True
    for part in others:
        adjacent &= part.data_ptr() == end and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        end += part.nbytes
    if adjacent:  # views of one already
        rows = sum(len(part) for part in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole
