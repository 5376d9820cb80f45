"""`--quantization` on a GPU: weights of every linear by torchao, which is only needed for that."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..transfer.errors import ConfigError

MAX_REASON_CHARS = 300


def quantize_by_torchao(module: PreTrainedModel, kind: str) -> None:
    """int8 and int4: weights only; fp8: activations too, each row with a scale of its own. Raises ConfigError."""
    try:
        from torchao import quantization as torchao  # an option of few, and a second to import
    except ImportError as error:
        raise ConfigError(f"--quantization {kind} on a GPU needs torchao ({error}); run: pip install torchao") from None
    try:
        torchao.quantize_(module, _config(torchao, kind))
    except (ImportError, RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        raise ConfigError(f"--quantization {kind}: torchao cannot do it here: {reason}") from None


def _config(torchao: Any, kind: str) -> Any:
    if kind == "int8":
        return torchao.Int8WeightOnlyConfig()
    if kind == "int4":
        return torchao.Int4WeightOnlyConfig()
    return torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
