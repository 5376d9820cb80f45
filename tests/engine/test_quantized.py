"""`--quantization`: near the float32 model, rows alone as in a batch, float32 weights gone, and who is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pdserve.engine import fused as fused_module
from pdserve.engine import packed as packed_module
from pdserve.engine import quantized as quantized_module
from pdserve.engine.fused import FusedLayer
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import LoadedModel, describe, load_model
from pdserve.engine.packed import PackedLinear
from pdserve.engine.runner import Chunk, Runner
from pdserve.kernels.quantized import QUANTIZATIONS, Quantization
from pdserve.transfer.errors import ConfigError
from tests.engine.test_fused import CHUNKS, count, run
from tests.engine.tiny_models import FAMILIES, build, prompts

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

# Of the logits, in their standard deviations. These models have weights of noise, on which quantisation is hardest.
TOLERANCE = {"int8": 0.1, "int4": 0.8}


def load(family: str, kind: Quantization | None, fused_modules: bool = True) -> LoadedModel:
    return describe(
        build(family), fingerprint="f", max_model_len=200, fused_modules=fused_modules, quantization=kind
    )  # fmt: skip


def deviation(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().mean().sqrt() / expected.std()).item()


@needs_compiler
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3", "phi3", "gemma2"])
def test_logits_stay_near_those_of_the_float32_model(family: str, kind: Quantization) -> None:
    expected = run(load(family, None), CHUNKS)
    whole = load(family, kind)
    assert count(whole.module, FusedLayer) == (0 if family == "gemma2" else 4)
    assert 0 < deviation(run(whole, CHUNKS), expected) < TOLERANCE[kind]


@needs_compiler
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_layers_compute_what_their_quantised_linears_would(family: str, kind: Quantization) -> None:
    """An activation may be rounded the other way now and then, so not to the last bits."""
    apart = load(family, kind, fused_modules=False)
    assert count(apart.module, FusedLayer) == 0
    assert deviation(run(load(family, kind), CHUNKS), run(apart, CHUNKS)) < TOLERANCE["int8"] / 4


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_quantised(family: str, kind: Quantization) -> None:
    loaded = load(family, kind)
    assert not any(type(module) is nn.Linear for module in loaded.module.modules())
    assert run(loaded, CHUNKS).isfinite().all()


@needs_compiler
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_a_decoding_sequence_has_the_same_logits_to_the_bit_alone_and_beside_others(
    family: str, kind: Quantization
) -> None:
    loaded = load(family, kind)
    together = run(loaded, CHUNKS)
    for row in (0, 2):
        assert torch.equal(run(loaded, [CHUNKS[row]])[0], together[row])


@needs_compiler
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "phi3"])
def test_how_a_prompt_was_cut_or_cached_does_not_show_to_the_bit(
    family: str, kind: Quantization, kv_dtype: str
) -> None:
    """What differs by rounding only may be quantised otherwise, and is no rounding any more."""
    loaded = load(family, kind)
    model = replace(loaded, layout=replace(loaded.layout, dtype=kv_dtype))
    (prompt,) = prompts([33])

    def logits(*lengths: int) -> Tensor:
        runner, start = Runner(model, KVCache(model.layout, 12, 4)), 0
        for length in lengths:
            part = prompt[start : start + length]
            found = runner.forward([Chunk(part, start, list(range(10)), True, of_prompt=length)])
            start += length
        return found

    whole = logits(33)
    for lengths in ((32, 1), (31, 2), (1, 1, 30, 1)):
        assert torch.equal(logits(*lengths), whole), lengths


@needs_compiler
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_recomputed_output_has_the_kv_that_it_had_to_the_bit(family: str, kind: Quantization, kv_dtype: str) -> None:
    loaded = load(family, kind)
    model = replace(loaded, layout=replace(loaded.layout, dtype=kv_dtype))
    (tokens,) = prompts([33])  # 20 of them a prompt
    once = Runner(model, KVCache(model.layout, 12, 4))
    once.forward([Chunk(tokens[:20], 0, list(range(10)), True, of_prompt=20)])
    for i in range(20, 33):
        expected = once.forward([Chunk([tokens[i]], i, list(range(10)), True, of_prompt=0)])
    again = Runner(model, KVCache(model.layout, 12, 4))
    again.forward([Chunk(tokens[:16], 0, list(range(10)), False, of_prompt=16)])
    assert torch.equal(again.forward([Chunk(tokens[16:], 16, list(range(10)), True, of_prompt=4)]), expected)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_only_embeddings_norms_and_biases_stay_float32(family: str) -> None:
    model = build(family)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    describe(model, fingerprint="f", max_model_len=200, quantization="int8")
    assert {name.split(".")[-2] for name, weight in model.named_parameters() if weight.dim() > 1} == {"embed_tokens"}
    assert isinstance(model.get_output_embeddings(), PackedLinear)


@needs_compiler
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_without_a_compiler_torch_computes_the_same(kind: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = run(load("llama", kind), CHUNKS)
    for module in (fused_module, packed_module, quantized_module):
        monkeypatch.setattr(module, "native", lambda: None)
    loaded = load("llama", kind)
    assert count(loaded.module, FusedLayer) == 0
    assert deviation(run(loaded, CHUNKS), in_c) < TOLERANCE["int8"] / 4


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "cpu"), ("float16", "cpu")])
def test_what_cannot_be_quantised_is_refused_before_anything_is_read(
    dtype: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=f"--quantization int8.*{device if device != 'cpu' else dtype}"):
        load_model(
            tmp_path, fingerprint="f", dtype=dtype, device=device, max_model_len=None, trust_remote_code=False,
            quantization="int8",
        )  # fmt: skip
