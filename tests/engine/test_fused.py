"""Layers on the kernels in C: which models get them, and that they compute the same."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdserve.engine import fused as fused_module
from pdserve.engine import packed as packed_module
from pdserve.engine.fused import FusedLayer
from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.packed import PackedLinear
from pdserve.engine.runner import Chunk, Runner
from pdserve.kernels import attention_native
from pdserve.kernels.library import open_library
from tests.engine.tiny_models import build, load, poisoned_cache, prompts
from tests.kernels.conftest import RUNNABLE

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

WHOLE = ("llama", "qwen2", "qwen2-window", "qwen3", "mistral-window", "phi3")
OWN_MLP = ("mixtral", "qwen2-moe-mask-only-window", "qwen3-moe")
NONE = ("gemma2", "granite", "olmo2", "gpt2", "deepseek-v3", "gpt-oss")


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def use(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL | None) -> None:
    for module in (fused_module, packed_module, attention_native):
        monkeypatch.setattr(module, "native", lambda: library)


def run(loaded: LoadedModel, chunks: list[Chunk]) -> Tensor:
    """A prompt of 20 tokens for every chunk's sequence, then the chunks."""
    runner = Runner(loaded, poisoned_cache(loaded, 24, 4))
    for chunk in chunks:
        runner.forward([Chunk(prompts([20])[0], 0, chunk.blocks, False)])
    return runner.forward(chunks)


CHUNKS = [
    Chunk([5], 20, [0, 3, 9, 1, 7, 4], True),
    Chunk([8, 9, 11], 20, [2, 10, 6, 8, 5, 11], True),
    Chunk([6], 20, [12, 13, 20, 14, 15, 16], True),
]


@pytest.mark.parametrize("family", [*WHOLE, *OWN_MLP])
def test_layers_made_of_the_parts_we_know_are_fused(family: str) -> None:
    model = build(family)
    load(model)
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
    assert len(layers) == 4
    assert all(isinstance(layer.original, nn.Module) for layer in layers)


@pytest.mark.parametrize("family", NONE)
def test_other_layers_are_left_as_they_are_but_for_their_linears(family: str) -> None:
    model = build(family)
    linears = sum(type(module) is nn.Linear for module in model.modules())
    load(model)
    assert count(model, FusedLayer) == 0
    assert count(model, PackedLinear) == linears


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3", "mixtral", "phi3"])
def test_fused_logits_equal_those_of_the_models_own_modules(
    family: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, None)
    expected = run(load(build(family)), CHUNKS)
    use(monkeypatch, open_library(level))
    loaded = load(build(family))
    assert count(loaded.module, FusedLayer) == 4
    torch.testing.assert_close(run(loaded, CHUNKS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", WHOLE)
def test_whole_layers_do_their_attention_themselves(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(build(family))
    monkeypatch.setattr(Runner, "attend", None)
    run(loaded, CHUNKS)


@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_the_hook_sees_each_layer_when_its_kv_is_written(family: str) -> None:
    loaded = load(build(family))
    cache = poisoned_cache(loaded, 24, 4)
    seen = []

    def on_layer(layer: int) -> None:
        seen.append((layer, bool(cache.keys[layer][[2, 10, 6]].isfinite().all())))

    Runner(loaded, cache, on_layer).forward([Chunk(prompts([12])[0], 0, [2, 10, 6], True)])
    assert seen == [(layer, True) for layer in range(4)]


@pytest.mark.parametrize("family", WHOLE)
def test_a_decoding_sequence_has_the_same_logits_to_the_bit_alone_and_beside_others(family: str) -> None:
    loaded = load(build(family))
    together = run(loaded, CHUNKS)
    for row in (0, 2):
        assert torch.equal(run(loaded, [CHUNKS[row]])[0], together[row])


def test_what_shows_only_at_late_positions_keeps_a_model_as_it_is() -> None:
    model = build("llama")

    def scale_late(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        late = kwargs["position_ids"][..., None] > 100
        return args, kwargs | {"hidden_states": torch.where(late, 1.5, 1.0) * kwargs["hidden_states"]}

    model.model.layers[2].self_attn.register_forward_pre_hook(scale_late, with_kwargs=True)
    load(model)
    assert count(model, FusedLayer) == 0
    short = build("llama")
    short.model.layers[2].self_attn.register_forward_pre_hook(scale_late, with_kwargs=True)
    describe(short, fingerprint="f", max_model_len=100)  # so short that it never happens
    assert count(short, FusedLayer) == 4


def test_a_model_that_calls_its_layers_in_another_way_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    own = list(model.model.layers)

    def forward(self: FusedLayer, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor]:
        return (hidden_states,)

    monkeypatch.setattr(FusedLayer, "forward", forward)
    loaded = load(model)
    assert list(model.model.layers) == own
    assert run(loaded, CHUNKS).isfinite().all()


@pytest.mark.parametrize("change", ["flag", "bfloat16", "no compiler"])
def test_a_model_keeps_its_own_modules_where_the_kernels_cannot_or_shall_not_run(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    if change == "bfloat16":
        model.to(torch.bfloat16)
    if change == "no compiler":
        use(monkeypatch, None)
    loaded = describe(model, fingerprint="f", max_model_len=200, fused_modules=change != "flag")
    assert count(model, FusedLayer) == count(model, PackedLinear) == 0
    assert run(loaded, CHUNKS).isfinite().all()
