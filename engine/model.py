"""`load_model`: a checkpoint directory becomes a module whose attention is known to go through our hook.

Nothing about a model's KV is read from its config. A few tokens are run, and the shapes that arrive at the hook are
the layout (`probe.py`); a model whose logits then differ from its own attention's is refused.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from ..kernels.strips import Form
from ..transfer.errors import CheckpointError, ConfigError, UnsupportedModel
from ..transfer.layout import KVLayout, Weights
from .fused import fuse, kernels_for
from .kv_cache import TORCH_DTYPES
from .model_directory import read_json, tensor_names, weight_files
from .packed import pack_floats
from .probe import probe_layers
from .quantized import WeightFormat, quantize_linears, require_quantizable
from .torchao_weights import quantize_by_torchao

log = logging.getLogger(__name__)

BY_TORCHAO: dict[WeightFormat, Weights] = {"int8": "torchao int8", "int4": "torchao int4", "fp8": "torchao fp8"}
MAX_REASON_CHARS = 300  # of a library's message, in a line of ours

# Rotations that depend on the longest sequence of the batch once it passes the original length.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass
class LoadedModel:
    """A model ready to serve; its KV layout was observed, not guessed."""

    module: PreTrainedModel
    layout: KVLayout
    eos_token_ids: frozenset[int]
    vocab_size: int  # columns of the logits
    max_model_len: int  # most tokens of one sequence, prompt and output together


def load_model(
    path: Path,
    *,
    fingerprint: str,
    dtype: str,
    device: str,
    max_model_len: int | None,
    trust_remote_code: bool,
    fused_modules: bool = True,
    quantization: WeightFormat | None = None,
    weight_form: Form | None = None,
) -> LoadedModel:
    """Load the Hugging Face directory at `path` for inference.

    Raises CheckpointError (missing or corrupt files, weights that do not cover the model), UnsupportedModel (by class,
    with the reason) and ConfigError (flags that cannot work).
    """
    torch_device = _parse_device(device)
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(TORCH_DTYPES)}")
    require_quantizable(quantization, torch_device, dtype)
    config = _load_config(path, trust_remote_code)
    require_decoder_only(config)
    limit = resolve_max_model_len(config.get_text_config(), max_model_len)
    for file in weight_files(path):
        tensor_names(file)  # raises, naming the file, unless all of it is there
    module = _load_weights(path, config, TORCH_DTYPES[dtype], trust_remote_code)
    torch.nn.Module.to(module, torch_device)
    module.train(False)
    module.requires_grad_(False)
    return describe(
        module,
        fingerprint=fingerprint,
        max_model_len=limit,
        fused_modules=fused_modules,
        quantization=quantization,
        weight_form=weight_form,
    )


def describe(
    module: PreTrainedModel,
    *,
    fingerprint: str,
    max_model_len: int,
    fused_modules: bool = True,
    quantization: WeightFormat | None = None,
    weight_form: Form | None = None,
) -> LoadedModel:
    """Probe a module that is in memory, then let the kernels in C do what they can of it; in float32 on the CPU, and
    checked as such, its weights are packed after that, or quantised. Raises UnsupportedModel.

    `weight_form`: no shorter one for packed weights, for comparison.
    """
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(f"{type(module).__name__}: its forward has no logits_to_keep")
    layers, vocab_size = probe_layers(module)
    if fused_modules:
        fuse(module, max_model_len, kernels_for(module))
    weights: Weights = "none"
    if quantization is not None:
        weights = _quantize(module, quantization)
    elif fused_modules:
        pack_floats(module, weight_form)
    dtype = next(name for name, torch_dtype in TORCH_DTYPES.items() if torch_dtype == module.dtype)
    return LoadedModel(
        module=module,
        layout=KVLayout(fingerprint, dtype, layers, weights),
        eos_token_ids=_eos_token_ids(module),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
    )


def _quantize(module: PreTrainedModel, kind: WeightFormat) -> Weights:
    """Returns what the layout says of such weights."""
    if kind == "fp8" or module.device.type == "cuda":
        quantize_by_torchao(module, kind)
        return BY_TORCHAO[kind]
    quantize_linears(module, kind)
    return kind


def _parse_device(device: str) -> torch.device:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device}: {_one_line(error)}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: must be cpu or cuda")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: this machine has {torch.cuda.device_count()} usable CUDA devices")
    return parsed


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"


def _load_config(path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    read_json(path / "config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except OSError as error:
        raise CheckpointError(f"{path / 'config.json'} cannot be read: {_one_line(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(f"{path} comes with code of its own; --trust-remote-code would run it") from error
        raise UnsupportedModel(f"{path / 'config.json'}: {_one_line(error)}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def require_decoder_only(config: PreTrainedConfig) -> None:
    """Refuse, before any weight is read, what a decoder-only text server cannot run. Raises UnsupportedModel."""
    name = (config.architectures or [type(config).__name__])[0]
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: an encoder-decoder model; only decoder-only models can be served")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{name}: a multimodal model ({config.model_type}); only text models can be served")


def resolve_max_model_len(config: PreTrainedConfig, asked: int | None) -> int:
    """The length to serve: `asked`, or all the model can do. Raises ConfigError when asked for more than that."""
    try:
        limit = config.max_position_embeddings
    except AttributeError:
        limit = None
    reason = "the model's max_position_embeddings"
    for cap, why in _length_caps(config):
        if limit is None or cap < limit:
            log.warning("serving at most %d tokens a sequence: %s", cap, why)
            limit, reason = cap, why
    if limit is None:
        if asked is None:
            raise ConfigError(f"{config.model_type}: the config names no maximum length; give --max-model-len")
        return asked
    if asked is None:
        return int(limit)
    if asked < 1 or asked > limit:
        raise ConfigError(f"--max-model-len {asked} is not between 1 and {limit} ({reason})")
    return asked


def _length_caps(config: PreTrainedConfig) -> Iterator[tuple[int, str]]:
    """Lengths beyond which a token's computation would depend on its neighbours, or on a mask we do not build."""
    fields: dict[str, Any] = config.to_dict()
    rope = fields.get("rope_parameters") or {}
    # One set of parameters, or one for each type of layer.
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind, original = parameters.get("rope_type"), parameters.get("original_max_position_embeddings")
        if kind in BATCH_DEPENDENT_ROPE and original is not None:
            yield int(original), f"past it, {kind} rotary embeddings depend on the other sequences of a step"
    chunk = fields.get("attention_chunk_size")
    if chunk is not None:
        yield int(chunk), "attention in chunks (attention_chunk_size) is served up to one chunk"


def _load_weights(path: Path, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Load every weight, or raise: transformers would start a layer without weights at random, with a warning."""
    auto_model: Any = AutoModelForCausalLM  # transformers is untyped here
    logging_of_transformers: Any = hf_logging
    logging_of_transformers.set_verbosity_error()  # what its load report warns of is an error here, in one line
    if not sys.stderr.isatty():
        logging_of_transformers.disable_progress_bar()
    try:
        module, report = auto_model.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",  # what the probe compares with; every class has it
            ignore_mismatched_sizes=True,  # reported, and refused below by name
            output_loading_info=True,
        )
    except OSError as error:
        raise CheckpointError(f"{path}: {_one_line(error)}") from error
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the weights do not fit the model: {_one_line(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        name = (config.architectures or [type(config).__name__])[0]
        raise UnsupportedModel(f"{name}: {_one_line(error)}") from error
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise CheckpointError(f"{path}: {key} has shape {list(found)}, but the config asks for {list(wanted)}")
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{path}: the files lack {len(missing)} weights of the model, among them {missing[0]}")
    assert isinstance(module, PreTrainedModel)
    return module


def _eos_token_ids(module: PreTrainedModel) -> frozenset[int]:
    """What ends a text: the generation config's EOS ids, else the config's."""
    generation = module.generation_config
    assert isinstance(generation, GenerationConfig)
    eos = generation.eos_token_id
    if eos is None:
        eos = module.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])
