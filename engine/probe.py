"""Runs a few tokens through a model to learn its KV shapes, and to see that our attention is its attention."""

from __future__ import annotations

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
        self.layers: list[LayerShape] = []

    def attend(self, call: AttentionCall) -> Tensor:
        num_tokens, kv_heads, k_head_dim = call.k.shape
        if num_tokens != sum(PROBE_LENS):
            raise UnsupportedModel(f"attention sees {num_tokens} tokens where {sum(PROBE_LENS)} were given")
        self.layers.append(LayerShape(kv_heads=kv_heads, k_head_dim=k_head_dim, v_head_dim=call.v.shape[2]))
        parts = zip(*(torch.split(tensor, PROBE_LENS) for tensor in (call.q, call.k, call.v)), strict=True)
        return torch.cat(
            [
                attend_by_definition(
                    q, k, v, scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks
                )
                for q, k, v in parts
            ]
        )


@torch.inference_mode()
def probe_layers(module: PreTrainedModel) -> tuple[tuple[LayerShape, ...], int]:
    """The KV shape of every layer, and the width of the logits. Raises UnsupportedModel, naming class and reason.

    Two short sequences are run one by one with the model's own attention, then flattened into one batch with ours:
    whatever mixes sequences, or hides from the hook, shows as a difference. Leaves our attention installed.
    """
    name = type(module).__name__
    text_config = module.config.get_text_config()
    ids = torch.arange(1, 1 + sum(PROBE_LENS), device=module.device) % text_config.vocab_size
    recorder = _Recorder()
    try:
        expected = torch.cat([_logits(module, part, torch.arange(len(part))) for part in torch.split(ids, PROBE_LENS)])
        install(module, recorder.attend)
        found = _logits(module, ids, torch.cat([torch.arange(length) for length in PROBE_LENS]))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModel(f"{name}: it cannot run a flattened batch: {reason}") from error
    num_layers = text_config.num_hidden_layers
    if len(recorder.layers) != num_layers:
        raise UnsupportedModel(
            f"{name}: {len(recorder.layers)} of its {num_layers} layers attend through the attention interface "
            "(state-space, recurrent and hybrid layers cannot be served)"
        )
    deviation = ((found - expected).abs().max() / expected.std()).item()
    if not deviation <= TOLERANCE[module.dtype]:  # NaN is refused too
        raise UnsupportedModel(
            f"{name}: its logits over a flattened batch differ from its own attention's ({deviation:.2g} deviations)"
        )
    return tuple(recorder.layers), expected.shape[-1]


def _logits(module: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:  # [num_tokens, vocab] float32
    output = module(
        input_ids=ids[None],
        position_ids=positions[None].to(ids.device),
        use_cache=False,
        logits_to_keep=torch.arange(len(ids), device=ids.device),
    )
    logits: Tensor = output.logits[0]
    return logits.float()
