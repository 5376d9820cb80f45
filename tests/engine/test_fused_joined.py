"""Layers with joined products, which a GPU gets, on the CPU: the same recognition, numbers and fall back as in C."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn

from pdserve.engine import fused as fused_module
from pdserve.engine.fused import FusedLayer, compile_layers, fuse, joined
from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.quantized import require_quantizable
from pdserve.engine.torchao_weights import quantize_by_torchao
from pdserve.kernels.joined_layer import JoinedLayer
from pdserve.transfer.errors import ConfigError
from tests.engine.test_fused import CHUNKS, NONE, OWN_MLP, WHOLE, count, run
from tests.engine.tiny_models import build


def plain(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return describe(build(family).to(dtype), fingerprint="f", max_model_len=200, fused_modules=False)


def with_joined(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    loaded = plain(family, dtype)
    fuse(loaded.module, 200, joined)
    return loaded


@pytest.mark.parametrize("family", [*WHOLE, *OWN_MLP])
def test_joined_layers_give_the_logits_of_the_models_own(family: str) -> None:
    loaded = with_joined(family)
    assert count(loaded.module, JoinedLayer) == 4
    torch.testing.assert_close(run(loaded, CHUNKS), run(plain(family), CHUNKS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_half_precision_is_fused_too(family: str) -> None:
    loaded, own = with_joined(family, torch.bfloat16), plain(family, torch.bfloat16)
    assert count(loaded.module, JoinedLayer) == 4
    exact = run(plain(family), CHUNKS)
    worst, allowed = ((run(model, CHUNKS).float() - exact).abs().max() for model in (loaded, own))
    assert worst < 2 * allowed, "no worse than the model's own rounding"


@pytest.mark.parametrize("family", NONE)
def test_other_models_keep_their_layers(family: str) -> None:
    assert count(with_joined(family).module, FusedLayer) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "mixtral"])
def test_joined_weights_take_no_memory_of_their_own(family: str) -> None:
    def used(model: nn.Module) -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(storages.values())

    before = used(build(family))
    loaded = with_joined(family)
    gc.collect()
    assert count(loaded.module, JoinedLayer) == 4
    assert used(loaded.module) == before


def test_a_model_that_does_not_compute_the_same_keeps_its_layers_and_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_module.JoinedLayer, "add_mlp", lambda self, normed, total: None)
    loaded = with_joined("llama")
    assert count(loaded.module, FusedLayer) == 0
    monkeypatch.undo()
    assert torch.equal(run(loaded, CHUNKS), run(plain("llama"), CHUNKS))


def test_compiled_layers_are_traced_whole_and_say_the_same() -> None:
    loaded = with_joined("qwen3")
    expected = run(loaded, CHUNKS)
    compile_layers(loaded.module, backend="eager")  # traced by torch, run as it is
    torch.testing.assert_close(run(loaded, CHUNKS), expected, rtol=1e-5, atol=1e-5)


def test_compiling_what_has_no_joined_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="--torch-compile: there is nothing to compile on the CPU"):
        compile_layers(describe(build("llama"), fingerprint="f", max_model_len=200).module)


def test_int8_weights_by_torchao_are_close_and_a_row_does_not_depend_on_its_neighbours() -> None:
    pytest.importorskip("torchao")
    loaded = with_joined("llama", torch.bfloat16)
    expected = run(loaded, CHUNKS)
    quantize_by_torchao(loaded.module, "int8")
    layer = next(module for module in loaded.module.modules() if isinstance(module, JoinedLayer))
    assert "Int8" in type(layer.qkv.weight).__name__
    found = run(loaded, CHUNKS)
    assert 0 < (found - expected).abs().max() / expected.std() < 0.5
    alone = run(loaded, [CHUNKS[0]])[0]
    assert (found[0] - alone).abs().max() / expected.std() < 0.1


def test_fp8_weights_are_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 works on a GPU only"):
        require_quantizable("fp8", torch.device("cpu"), "bfloat16")
    require_quantizable("fp8", torch.device("cuda"), "bfloat16")


def test_what_torchao_cannot_do_is_one_line_that_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    loaded = with_joined("llama", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"--quantization fp8: torchao cannot do it here: .*capability"):
        quantize_by_torchao(loaded.module, "fp8")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"--quantization int8 on a GPU needs torchao .*pip install torchao"):
        quantize_by_torchao(loaded.module, "int8")
