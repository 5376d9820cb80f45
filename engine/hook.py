"""The one place where a transformers model's attention becomes ours.

transformers looks up attention by name in a registry, each time a layer runs. `install` puts a function there under
a fresh name and points the model at it: the model's own code is untouched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.attention_native import NativeStep, PagedLayer
from ..transfer.errors import UnsupportedModel


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention as the model asks for it, over a flattened batch."""

    q: Tensor  # [num_tokens, heads, k_head_dim]
    k: Tensor  # [num_tokens, kv_heads, k_head_dim]
    v: Tensor  # [num_tokens, kv_heads, v_head_dim]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]


# Tensors a layer may pass that change nothing here: positions are in q and k already.
HARMLESS_TENSORS = {"s_aux", "position_ids"}


class Attention(Protocol):
    """Who computes a model's attention."""

    def attend(self, call: AttentionCall) -> Tensor:
        """One layer's, the layers of a step in their order: [num_tokens, heads, v_head_dim]."""
        ...

    def paged(self, known: AttentionCall) -> PagedCall | None:
        """The next layer's, for a fused layer to compute itself; None if it is to call `attend` instead.

        `known` holds that layer's settings.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedCall:
    """A fused layer writes its KV to the slots, calls `written`, and computes the attention of the step."""

    layer: PagedLayer
    step: NativeStep
    slots: Tensor  # [num_tokens] int64
    written: Callable[[], None]


class Seat:
    """Where the attention of one model sits, and may be replaced."""

    def __init__(self) -> None:
        self.name = f"pdserve-{uuid4().hex}"
        self._attention: weakref.ref[Attention] | None = None

    def take(self, attention: Attention) -> None:
        self._attention = weakref.ref(attention)

    @property
    def attention(self) -> Attention:
        attention = None if self._attention is None else self._attention()
        assert attention is not None, "the owner of this attention is gone"
        return attention


_seats: weakref.WeakKeyDictionary[PreTrainedModel, Seat] = weakref.WeakKeyDictionary()


def seat_of(model: PreTrainedModel) -> Seat:
    """The seat of a model in which attention has been installed."""
    return _seats[model]


def install(model: PreTrainedModel, attention: Attention) -> None:
    """Route every attention of `model` to `attention`. Raises UnsupportedModel if the class cannot.

    The registry of transformers lives as long as the process, so it must not keep `attention` (and its model) alive.
    """
    seat = _seats.get(model)
    if seat is None:
        seat = _seats[model] = Seat()
        _register(seat)
    seat.take(attention)
    model.set_attn_implementation(seat.name)
    if model.config._attn_implementation != seat.name:
        raise UnsupportedModel(f"{type(model).__name__}: its attention does not go through the attention interface")


def _register(seat: Seat) -> None:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return seat.attention.attend(_parse(module, query, key, value, attention_mask, kwargs)).unsqueeze(0), None

    ALL_ATTENTION_FUNCTIONS.register(seat.name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(seat.name, _window_mark)


def _window_mark(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """Stand in for the mask transformers would build: None if causal, else the window's size as a scalar.

    Some models (Qwen2-MoE, PhiMoE) tell a layer its window through the mask alone.
    """
    return None if local_size is None else torch.tensor(local_size)


def _parse(
    module: nn.Module,
    query: Tensor,  # [1, heads, num_tokens, k_head_dim]
    key: Tensor,  # [1, kv_heads, num_tokens, k_head_dim]
    value: Tensor,  # [1, kv_heads, num_tokens, v_head_dim]
    mark: Tensor | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    owner = type(module).__name__
    causal = kwargs.get("is_causal")
    if causal is None:
        # Part of the interface: without the argument, the module's attribute says it, and absent means causal.
        causal = module.__dict__.get("is_causal", True)
    if not causal:
        raise UnsupportedModel(f"{owner}: its attention is not causal")
    for name, argument in kwargs.items():
        # A position bias, the indices of sparse attention: to ignore one would give wrong text.
        if isinstance(argument, Tensor) and name not in HARMLESS_TENSORS:
            raise UnsupportedModel(f"{owner}: paged attention does not know its argument {name}")
    window = kwargs.get("sliding_window")
    if mark is not None:
        if mark.dim() > 0:
            raise UnsupportedModel(f"{owner}: it builds an attention mask of its own")
        window = int(mark) if window is None else window
    scale = kwargs.get("scaling")
    return AttentionCall(
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
