"""The one place where a transformers model's attention becomes ours.

transformers looks up attention by name in a registry, each time a layer runs. `install` puts a function there under
a fresh name and points the model at it: the model's own code is untouched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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

AttentionHandler = Callable[[AttentionCall], Tensor]  # answers [num_tokens, heads, v_head_dim]

_handlers: dict[str, weakref.WeakMethod[AttentionHandler]] = {}  # by the name under which each was installed


def install(model: PreTrainedModel, handler: AttentionHandler) -> None:
    """Route every attention of `model` to `handler`, a bound method. Raises UnsupportedModel if the class cannot.

    The registry lives as long as the process, so it must not keep the handler's owner (and its model) alive.
    """
    name = f"pdserve-{uuid4().hex}"
    method = weakref.WeakMethod(handler)
    _handlers[name] = method

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return _target(name)(_parse(module, query, key, value, attention_mask, kwargs)).unsqueeze(0), None

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _window_mark)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UnsupportedModel(f"{type(model).__name__}: its attention does not go through the attention interface")


def _target(name: str) -> AttentionHandler:
    handler = _handlers[name]()
    assert handler is not None, "the owner of this attention is gone"
    return handler


def attend(config: PreTrainedConfig, call: AttentionCall) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """What a layer of ours does in place of transformers' own: ask the handler installed in the model of `config`."""
    return _target(config._attn_implementation)(call)


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
