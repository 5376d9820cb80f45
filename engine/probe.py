"""Runs a few tokens through a model to learn its KV shapes, and to see that our attention is its attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.attention_reference import attend_by_definition
from ..transfer.errors import UnsupportedModel
from ..transfer.layout import LayerShape
from .hook import AttentionCall, install

PROBE_LENS = [3, 5]

# Largest difference of a logit, in standard deviations of the logits. A missing bias or mask moves them by ~1;
# half precision rounds, and may flip an expert of a mixture.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.5, torch.bfloat16: 0.5}


class _Recorder:
    """Attends by definition over the probe's flattened sequences, noting the shapes of every call."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        num_tokens = len(call.k)
        if num_tokens != sum(PROBE_LENS):
            raise UnsupportedModel(f"attention sees {num_tokens} tokens where {sum(PROBE_LENS)} were given")
        self.calls.append(call)
        parts = zip(*(torch.split(tensor, PROBE_LENS) for tensor in (call.q, call.k, call.v)), strict=True)
        return torch.cat(
            [
                attend_by_definition(
                    q, k, v, scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks
                )
                for q, k, v in parts
            ]
        )

    def paged(self, known: AttentionCall) -> None:
        return None


@torch.inference_mode()
def probe_layers(module: PreTrainedModel) -> tuple[tuple[LayerShape, ...], int]:
    """The KV shape of every layer, and the width of the logits. Raises UnsupportedModel, naming class and reason.

    Two short sequences are run one by one with the model's own attention, then flattened into one batch with ours:
    whatever mixes sequences, or hides from the hook, shows as a difference. Leaves our attention installed.
    """
    name = type(module).__name__
    text_config = module.config.get_text_config()
    ids = _probe_ids(module)
    recorder = _Recorder()
    try:
        expected = torch.cat([_logits(module, part, torch.arange(len(part))) for part in torch.split(ids, PROBE_LENS)])
        install(module, recorder)
        found = _logits(module, ids, torch.cat([torch.arange(length) for length in PROBE_LENS]))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModel(f"{name}: it cannot run a flattened batch: {reason}") from error
    num_layers = text_config.num_hidden_layers
    if len(recorder.calls) != num_layers:
        raise UnsupportedModel(
            f"{name}: {len(recorder.calls)} of its {num_layers} layers attend through the attention interface "
            "(state-space, recurrent and hybrid layers cannot be served)"
        )
    deviation = ((found - expected).abs().max() / expected.std()).item()
    if not deviation <= TOLERANCE[module.dtype]:  # NaN is refused too
        raise UnsupportedModel(
            f"{name}: its logits over a flattened batch differ from its own attention's ({deviation:.2g} deviations)"
        )
    return tuple(_shape(call) for call in recorder.calls), expected.shape[-1]


def _shape(call: AttentionCall) -> LayerShape:
    _, kv_heads, k_head_dim = call.k.shape
    return LayerShape(kv_heads=kv_heads, k_head_dim=k_head_dim, v_head_dim=call.v.shape[2])


def _probe_ids(module: PreTrainedModel) -> Tensor:  # [num_tokens]
    vocab_size: int = module.config.get_text_config().vocab_size
    return torch.arange(1, 1 + sum(PROBE_LENS), device=module.device) % vocab_size


@dataclass(frozen=True)
class Observation:
    """What a model did with the probe's tokens: all it asked of attention, and its logits."""

    calls: list[AttentionCall]
    logits: Tensor  # [num_tokens, vocab]

    def difference(self, other: Observation) -> float:
        """Largest difference of any number, in standard deviations of its tensor; infinite where settings differ."""
        if len(self.calls) != len(other.calls):
            return math.inf
        pairs = [(self.logits, other.logits)]
        for mine, theirs in zip(self.calls, other.calls, strict=True):
            if (mine.scale, mine.window, mine.softcap) != (theirs.scale, theirs.window, theirs.softcap):
                return math.inf
            if mine.sinks is not theirs.sinks:
                return math.inf
            pairs += [(mine.q, theirs.q), (mine.k, theirs.k), (mine.v, theirs.v)]
        if any(mine.shape != theirs.shape for mine, theirs in pairs):
            return math.inf
        differences = [((mine - theirs).abs().max() / mine.std()).item() for mine, theirs in pairs]
        return math.inf if any(math.isnan(difference) for difference in differences) else max(differences)


@torch.inference_mode()
def observe(module: PreTrainedModel, max_model_len: int) -> Observation:
    """Run the probe's tokens, one sequence at the first positions and one at the last. Installs our attention.

    What depends on the position, and starts to matter only late, shows.
    """
    recorder = _Recorder()
    install(module, recorder)
    early, late = PROBE_LENS
    positions = torch.cat([torch.arange(early), torch.arange(late) + max(0, max_model_len - late)])
    return Observation(recorder.calls, _logits(module, _probe_ids(module), positions))


def _logits(module: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:  # [num_tokens, vocab] float32
    output = module(
        input_ids=ids[None],
        position_ids=positions[None].to(ids.device),
        use_cache=False,
        logits_to_keep=torch.arange(len(ids), device=ids.device),
    )
    logits: Tensor = output.logits[0]
    return logits.float()
