"""Loading: what a model directory becomes, and the one line that says why it cannot be served."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from pdserve.engine.model import LoadedModel, describe, load_model, require_decoder_only, resolve_max_model_len
from pdserve.transfer.errors import CheckpointError, ConfigError, UnsupportedModel
from pdserve.transfer.layout import LayerShape
from tests.engine.tiny_models import COMMON, FAMILIES, build


def load_directory(path: Path, **changes: Any) -> LoadedModel:
    arguments: dict[str, Any] = {
        "fingerprint": "f", "dtype": "float32", "device": "cpu", "max_model_len": None, "trust_remote_code": False
    }  # fmt: skip
    return load_model(path, **(arguments | changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(path)
    return path


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_a_directory_becomes_a_model_whose_layout_was_observed(saved: Path) -> None:
    loaded = load_directory(saved, fingerprint="abc")
    assert loaded.layout.layers == (LayerShape(kv_heads=2, k_head_dim=12, v_head_dim=12),) * 4
    assert (loaded.layout.fingerprint, loaded.layout.dtype) == ("abc", "float32")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (131, 256, {2})
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_a_sharded_directory_loads_the_same_weights(saved: Path, sharded: Path) -> None:
    whole, parts = (load_directory(path).module.state_dict() for path in (saved, sharded))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_asked_for_is_that_of_weights_and_kv(saved: Path, dtype: str) -> None:
    loaded = load_directory(saved, dtype=dtype)
    assert loaded.layout.dtype == dtype
    assert loaded.module.dtype == getattr(torch, dtype)


def test_latent_attention_has_its_own_value_head_size() -> None:
    layers = describe(build("deepseek-v3"), fingerprint="f", max_model_len=10).layout.layers
    assert layers == (LayerShape(kv_heads=4, k_head_dim=16, v_head_dim=12),) * 4


@pytest.mark.parametrize("eos", [[2, 7], [7]])
def test_the_generation_configs_eos_ids_win(directory: Path, eos: list[int]) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_directory(directory).eos_token_ids == set(eos)


# --- files ---------------------------------------------------------------------------------------------------


def _remove_config(path: Path) -> str:
    (path / "config.json").unlink()
    return "config.json"


def _truncate_weights(path: Path) -> str:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return "model.safetensors"


def _garble_weights(path: Path) -> str:
    (path / "model.safetensors").write_bytes(b"not weights at all" * 100)
    return "model.safetensors"


def _remove_weights(path: Path) -> str:
    (path / "model.safetensors").unlink()
    return "model.safetensors"


def _lose_a_tensor(path: Path) -> str:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return "model.layers.2.self_attn.k_proj.weight"


def _reshape_a_tensor(path: Path) -> str:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return "model.norm.weight"


def _garble_config(path: Path) -> str:
    (path / "config.json").write_text('{"model_type": "llama", ')
    return "config.json"


@pytest.mark.parametrize(
    "damage",
    [
        _remove_config, _garble_config, _truncate_weights, _garble_weights, _remove_weights, _lose_a_tensor,
        _reshape_a_tensor,
    ],
)  # fmt: skip
def test_a_damaged_directory_is_refused_in_one_line_that_names_the_culprit(
    directory: Path, damage: Callable[[Path], str]
) -> None:
    culprit = damage(directory)
    with pytest.raises(CheckpointError) as raised:
        load_directory(directory)
    assert culprit in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_shard_is_refused_by_name(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError) as raised:
        load_directory(sharded)
    assert shard.name in str(raised.value)


def test_a_shard_that_lacks_what_the_index_promises_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors or {"x": torch.ones(1)}, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as raised:
        load_directory(sharded)
    assert lost in str(raised.value)


# --- classes that cannot be served ---------------------------------------------------------------------------


def _small(config: type[hf.PreTrainedConfig], **fields: Any) -> hf.PreTrainedConfig:
    return config(**(COMMON | fields))


UNSUPPORTED: dict[str, tuple[Callable[[], hf.PreTrainedConfig], str, str]] = {
    "mamba": (lambda: _small(hf.MambaConfig, state_size=4), "MambaForCausalLM", "0 of its 4 layers"),
    "mamba2": (
        lambda: _small(hf.Mamba2Config, state_size=4, num_heads=4, head_dim=16, expand=2, n_groups=2),
        "Mamba2ForCausalLM",
        "",
    ),
    "hybrid": (
        lambda: _small(hf.Lfm2Config, layer_types=["conv", "full_attention"] * 2),
        "Lfm2ForCausalLM",
        "2 of its 4 layers",
    ),
    "jamba": (
        lambda: _small(
            hf.JambaConfig, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4
        ),
        "JambaForCausalLM",
        "2 of its 4 layers",
    ),
    "bloom": (lambda: hf.BloomConfig(vocab_size=131, hidden_size=32, n_layer=2, n_head=4), "BloomForCausalLM", ""),
    "bidirectional": (lambda: _small(hf.BertConfig, is_decoder=False), "BertLMHeadModel", "not causal"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_class_that_paged_attention_cannot_serve_is_refused_with_the_reason(kind: str) -> None:
    config, name, reason = UNSUPPORTED[kind]
    model = hf.AutoModelForCausalLM.from_config(config(), attn_implementation="eager").eval()
    with pytest.raises(UnsupportedModel) as raised:
        describe(model, fingerprint="f", max_model_len=10)
    assert name in str(raised.value)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_encoder_decoder_is_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    hf.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration: an encoder-decoder"):
        load_directory(tmp_path)


def test_multimodal_is_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    hf.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="Gemma3ForConditionalGeneration: a multimodal"):
        load_directory(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_supported_family_is_taken_for_another_kind(family: str) -> None:
    require_decoder_only(FAMILIES[family]())


def test_an_unknown_model_type_is_refused_by_name(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(UnsupportedModel, match="no-such-thing"):
        load_directory(directory)


def test_code_that_comes_with_a_model_does_not_run_unasked(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "mine.py").write_text(f"open({str(directory / 'ran')!r}, 'w').close()")
    with pytest.raises(UnsupportedModel, match="trust"):
        load_directory(directory)
    assert not (directory / "ran").exists()


def test_a_model_whose_batch_mixes_sequences_is_refused() -> None:
    """What the probe is for: nothing in the config shows it."""
    model = build("llama")
    norm = model.model.norm
    norm.register_forward_hook(lambda module, args, output: output + output.mean(dim=1, keepdim=True))
    with pytest.raises(UnsupportedModel, match="differ from its own"):
        describe(model, fingerprint="f", max_model_len=10)


# --- length, dtype, device -----------------------------------------------------------------------------------


def llama(**fields: Any) -> hf.LlamaConfig:
    return hf.LlamaConfig(**(COMMON | fields))


def test_the_length_is_the_models_unless_less_is_asked() -> None:
    assert resolve_max_model_len(llama(), None) == 256
    assert resolve_max_model_len(llama(), 100) == 100
    assert resolve_max_model_len(FAMILIES["gpt2"](), None) == 256


@pytest.mark.parametrize("asked", [257, 0, -1])
def test_a_length_the_model_does_not_have_is_refused_naming_both(asked: int) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_max_model_len(llama(), asked)
    assert str(asked) in str(raised.value)
    assert "256" in str(raised.value)


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0, "factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (lambda: hf.Phi3Config(**COMMON, rope_parameters=LONGROPE, original_max_position_embeddings=64), 64),
        (
            lambda: llama(
                rope_parameters={
                    "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0,
                    "original_max_position_embeddings": 128,
                }
            ),
            128,
        ),
        (FAMILIES["llama4"], 128),
    ],
    ids=["longrope", "dynamic", "chunked-attention"],
)  # fmt: skip
def test_lengths_at_which_neighbours_would_matter_are_cut_off_aloud(
    config: Callable[[], hf.PreTrainedConfig], limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="pdserve.engine.model"):
        assert resolve_max_model_len(config(), None) == limit
    assert str(limit) in caplog.text
    with pytest.raises(ConfigError, match=str(limit)):
        resolve_max_model_len(config(), limit + 1)


def test_scaling_that_is_the_same_for_every_length_is_not_cut_off() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    assert resolve_max_model_len(llama(rope_parameters=yarn), None) == 256


@pytest.mark.parametrize(
    ("flag", "value"), [("dtype", "int8"), ("device", "tpu-of-tomorrow"), ("device", "meta"), ("device", "cuda:99")]
)
def test_a_flag_that_cannot_work_is_refused_by_name(saved: Path, flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag} {value}"):
        load_directory(saved, **{flag: value})
