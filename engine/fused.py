"""Decoder layers of a transformers model replaced by ones on our kernels.

In C on the CPU, over the model's own weights until these are packed (`packed`); on a GPU with q, k, v and gate, up
joined, of which the original weights become views. A layer is recognised by what it is made of (pre-norm, q, k, v and o
projections, joined or apart, perhaps norms of q and k, a gated MLP or one of its own kind), not by its name. What a
list of parts cannot show (another formula in the norm, scaled residuals, a query scaled by its position) shows in
numbers: the model runs a few tokens, early and late positions among them, before and after, and keeps its own layers if
any layer's queries, keys, values or settings of attention, or the logits, differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.decoder_layer import DecoderLayer, GatedMLP, LayerWeights, Norm, Projection, Scratch
from ..kernels.joined_layer import JoinedLayer
from ..kernels.library import native
from ..transfer.errors import ConfigError, UnsupportedModel
from .hook import AttentionCall, Seat, seat_of
from .probe import Observation, observe

log = logging.getLogger(__name__)

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
APART, JOINED = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
MLP_APART, MLP_JOINED = {"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}
EPSILONS = ("variance_epsilon", "eps")

# Largest difference of logits, queries, keys and values, in their standard deviations: rounding stays below it.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.5, torch.bfloat16: 0.5}

COMPILED = ("attention_inputs", "attention_outputs", "add_mlp")  # of a joined layer

Kernels = Callable[[LayerWeights], DecoderLayer | JoinedLayer | None]  # a layer of ours, unless it is not for them


class FusedLayer(nn.Module):
    """A decoder layer in a few calls of ours. `original` still owns its float32 weights, in C."""

    def __init__(
        self,
        original: nn.Module,
        layer: DecoderLayer | JoinedLayer,
        attention: AttentionCall,
        seat: Seat,
        scratch: Scratch,
        *,
        own_mlp: bool,
    ) -> None:
        super().__init__()
        self.original = original
        self.layer = layer
        self.attention = attention  # what the original asks for, but for q, k and v
        self._own_mlp = own_mlp
        self._seat = seat
        self._scratch = scratch

    def __getattr__(self, name: str) -> Any:
        # The model asks a layer for what it decides by, such as its type of attention.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    @property
    def whole(self) -> DecoderLayer | None:
        """The kernels that do all of this layer, attention over a paged cache too; None if something is left."""
        return self.layer if isinstance(self.layer, DecoderLayer) and not self._own_mlp else None

    def take(self, layer: DecoderLayer | JoinedLayer) -> None:
        """Compute with other weights from now on; the original lets go of its own that are not needed any more."""
        self.layer = layer
        for part in ("self_attn",) if self._own_mlp else ("self_attn", "mlp"):
            parent = self.original.get_submodule(part)
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, nn.Identity())  # nobody calls it

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        cos, sin = (part.contiguous() for part in position_embeddings)
        attention, layer, whole = self._seat.attention, self.layer, self.whole
        if whole is not None and (paged := attention.paged(self.attention)):
            hidden = hidden_states.contiguous()
            whole.begin(paged.layer, paged.slots, hidden, cos, sin, self._scratch)
            paged.written()
            whole.end(paged.layer, paged.step, hidden, self._scratch)
            return hidden
        hidden = hidden_states[0].contiguous()  # [num_tokens, hidden]
        q, k, v = layer.attention_inputs(hidden, cos[0], sin[0])
        known = self.attention
        call = AttentionCall(q, k, v, known.scale, known.window, known.softcap, known.sinks)
        total, normed = layer.attention_outputs(attention.attend(call).contiguous(), hidden)
        if self._own_mlp:
            mixed: Tensor = self.original.get_submodule("mlp")(normed[None])
            return total[None] + mixed
        layer.add_mlp(normed, total)
        return total[None]


def in_c(weights: LayerWeights) -> DecoderLayer:
    library = native()
    assert library is not None
    return DecoderLayer(weights, library)


def joined(weights: LayerWeights) -> JoinedLayer | None:
    norms = [norm for norm in (weights.q_norm, weights.k_norm) if norm is not None]
    if len(norms) == 1 or any(norm.weight.numel() != weights.head_dim for norm in norms):
        return None
    return JoinedLayer(weights)


def kernels_for(module: PreTrainedModel) -> Kernels | None:
    """What can take the place of this model's layers; None where nothing can."""
    if module.device.type == "cuda":
        return joined
    return in_c if module.dtype == torch.float32 and module.device.type == "cpu" and native() is not None else None


def fuse(module: PreTrainedModel, max_model_len: int, kernels: Kernels | None) -> None:
    """Replace what the kernels do better; nothing without any.

    The model has been probed. Leaves the attention of a probe installed.
    """
    if kernels is None:
        return
    before, _ = _observe(module, max_model_len)
    replaced = {} if before is None else _fuse_layers(module, before.calls, kernels)
    if before is None or not replaced:
        return
    after, reason = _observe(module, max_model_len)
    if after is not None:
        difference = before.difference(after)
        if difference <= TOLERANCE[module.dtype]:
            log.info("%d of %d layers run on kernels of ours", len(replaced), len(before.calls))
            for fused in replaced.values():
                if isinstance(fused.layer, JoinedLayer):
                    fused.take(fused.layer)
            return
        reason = f"fused ones differ by {difference:.2g}"
    log.info("%s keeps its own layers: %s", type(module).__name__, reason)
    for name, fused in replaced.items():
        module.set_submodule(name, fused.original)


def compile_layers(module: PreTrainedModel, backend: str = "inductor") -> None:
    """Have torch compile what the layers do around their attention, at their first steps. Raises ConfigError."""
    layers = [child.layer for child in module.modules() if isinstance(child, FusedLayer)]
    ours = [layer for layer in layers if isinstance(layer, JoinedLayer)]
    if not ours:
        where = "on the CPU" if module.device.type == "cpu" else "in a model that keeps its own layers"
        raise ConfigError(f"--torch-compile: there is nothing to compile {where}")
    for layer in ours:
        for name in COMPILED:
            setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True, fullgraph=True, backend=backend))


def _observe(module: PreTrainedModel, max_model_len: int) -> tuple[Observation | None, str]:
    """What the model does with the probe's tokens; or why that failed: nobody knows how a model calls its layers."""
    try:
        return observe(module, max_model_len), ""
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, UnsupportedModel) as error:
        return None, " ".join(str(error).split()) or type(error).__name__


def _fuse_layers(module: PreTrainedModel, calls: list[AttentionCall], kernels: Kernels) -> dict[str, FusedLayer]:
    """Put fused layers in the place of those that can be, all or none; by name."""
    found = [
        (name, child) for name, child in module.named_modules() if dict(child.named_children()).keys() >= LAYER_PARTS
    ]
    if len(found) != len(calls):
        return {}
    layers: dict[str, FusedLayer] = {}
    scratch = Scratch()
    for (name, child), call in zip(found, calls, strict=True):
        weights = _recognise(child, call)
        layer = None if weights is None else kernels(weights)
        if weights is None or layer is None:
            return {}
        layers[name] = FusedLayer(child, layer, call, seat_of(module), scratch, own_mlp=weights.mlp is None)
    for name, fused in layers.items():
        module.set_submodule(name, fused)
    return layers


def _recognise(layer: nn.Module, call: AttentionCall) -> LayerWeights | None:
    """The weights of a layer that is made of the parts we know; None for any other."""
    parts = {name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
    if parts.keys() != LAYER_PARTS or list(layer.parameters(recurse=False)):
        return None
    attention = parts["self_attn"]
    inner = dict(attention.named_children())
    linears = inner.keys() - NORMS
    if linears not in (APART, JOINED) or list(attention.parameters(recurse=False)):
        return None
    _, heads, head_dim = call.q.shape
    kv_rows = call.k.shape[1] * head_dim
    if linears == APART:
        q, k, v = (_projection(inner[name]) for name in ("q_proj", "k_proj", "v_proj"))
    else:
        q, k, v = _split(inner["qkv_proj"], [heads * head_dim, kv_rows, kv_rows])
    o, norms = _projection(inner["o_proj"]), {name: _norm(inner[name]) for name in NORMS & inner.keys()}
    before, after = _norm(parts["input_layernorm"]), _norm(parts["post_attention_layernorm"])
    if q is None or k is None or v is None or o is None or before is None or after is None or None in norms.values():
        return None
    rows = [q.shape[0], k.shape[0], v.shape[0], o.shape[1]]
    if rows != [heads * head_dim, kv_rows, kv_rows, heads * head_dim]:
        return None
    mlp = _gated_mlp(parts["mlp"])
    return LayerWeights(head_dim, before, q, k, v, norms.get("q_norm"), norms.get("k_norm"), o, after, mlp)


def _projection(module: nn.Module) -> Projection | None:
    if type(module) is not nn.Linear or not module.weight.is_contiguous():
        return None
    return Projection(module.weight, module.bias)


def _split(module: nn.Module, rows: list[int]) -> list[Projection] | list[None]:
    """One projection as several, which stay views of it."""
    if type(module) is not nn.Linear or not module.weight.is_contiguous() or len(module.weight) != sum(rows):
        return [None] * len(rows)
    biases = [None] * len(rows) if module.bias is None else torch.split(module.bias, rows)
    return [Projection(weight, bias) for weight, bias in zip(torch.split(module.weight, rows), biases, strict=True)]


def _norm(module: nn.Module) -> Norm | None:
    """A norm that computes what ours does, by trying it."""
    weights = list(module.parameters())
    epsilon = next((vars(module)[name] for name in EPSILONS if name in vars(module)), None)
    if len(weights) != 1 or weights[0].dim() != 1 or not isinstance(epsilon, float):
        return None
    weight = weights[0]
    x = torch.linspace(-1.0, 2.0, len(weight), dtype=torch.float32, device=weight.device)[None] * 0.01
    expected = weight.float() * x * torch.rsqrt(x.square().mean() + epsilon)
    relative = 1e-4 if weight.dtype == torch.float32 else 4 * torch.finfo(weight.dtype).eps
    if not torch.allclose(module(x.to(weight.dtype)).float(), expected, rtol=relative, atol=relative / 100):
        return None
    return Norm(weight, epsilon)


def _gated_mlp(module: nn.Module) -> GatedMLP | None:
    parts = dict(module.named_children())
    if parts.keys() not in (MLP_APART, MLP_JOINED) or list(module.parameters(recurse=False)):
        return None
    if parts.keys() == MLP_APART:
        activation, (gate, up) = parts["act_fn"], (_projection(parts[name]) for name in ("gate_proj", "up_proj"))
    else:
        joined = parts["gate_up_proj"]
        size = joined.out_features if isinstance(joined, nn.Linear) else 0
        activation, (gate, up) = parts["activation_fn"], _split(joined, [size // 2, size // 2])
    down = _projection(parts["down_proj"])
    x = torch.linspace(-9.0, 9.0, 100)
    if gate is None or up is None or down is None or not torch.allclose(activation(x), F.silu(x)):
        return None
    return GatedMLP(gate, up, down)
