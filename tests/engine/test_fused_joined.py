"""Layers with joined products, which a GPU gets, on the CPU: the same recognition, numbers and fall back as in C."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pdserve.engine import fused as fused_module
from pdserve.engine.fused import FusedLayer, fuse, joined
from pdserve.engine.model import LoadedModel, describe
from pdserve.kernels.joined_layer import JoinedLayer
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
