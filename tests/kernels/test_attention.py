"""Paged attention against its definition, on the shapes models have and on odd ones."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdserve.kernels import attention_native
from pdserve.kernels.attention import AttentionBatch, paged_attention
from pdserve.kernels.attention_cpu import MIN_TILE_ROWS
from pdserve.kernels.attention_reference import attend_by_definition
from pdserve.kernels.library import open_library
from tests.kernels.conftest import RUNNABLE
from tests.kernels.paged_cases import Case, Inputs, expected, make


def compute(case: Case, inputs: Inputs, batch: AttentionBatch | None = None, q: Tensor | None = None) -> Tensor:
    return paged_attention(
        inputs.q if q is None else q,
        inputs.k_cache,
        inputs.v_cache,
        batch or inputs.batch,
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=inputs.sinks,
    )


@pytest.fixture(params=[*RUNNABLE, "torch"], autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In C, at every instruction set, or in torch."""
    if request.param != "torch" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    library = None if request.param == "torch" else open_library(request.param)
    monkeypatch.setattr(attention_native, "native", lambda: library)
    return request.param


TILE = MIN_TILE_ROWS
CASES = {
    "plain": Case(),
    "block-of-one": Case(block_size=1),
    "block-of-three": Case(block_size=3),
    "block-of-32": Case(block_size=32),
    "odd-heads": Case(heads=9, kv_heads=3, k_head_dim=5, v_head_dim=5, block_size=3),
    "one-kv-head": Case(heads=7, kv_heads=1, k_head_dim=3, v_head_dim=3),
    "no-grouping": Case(heads=3, kv_heads=3, k_head_dim=24, v_head_dim=24),
    "latent": Case(heads=4, kv_heads=4, k_head_dim=24, v_head_dim=17, block_size=3),
    "window": Case(window=5),
    "window-of-one": Case(window=1, block_size=3),
    "window-in-blocks-of-one": Case(window=6, block_size=1),
    "window-equal-to-context": Case(window=29),
    "window-beyond-context": Case(window=1000),
    "window-shorter-than-chunk": Case(window=4, query_lens=(20, 3), context_lens=(31, 3), block_size=3),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "everything": Case(
        heads=6, kv_heads=2, k_head_dim=7, v_head_dim=9, block_size=3, window=6, softcap=2.0, sinks=True
    ),
    "whole-prompts": Case(query_lens=(13, 40), context_lens=(13, 40)),
    "decode-of-many-lengths": Case(
        heads=9,
        kv_heads=3,
        k_head_dim=64,
        v_head_dim=64,
        query_lens=(1,) * 7,
        context_lens=(1, 3, 63, 64, 65, 130, 200),
    ),
    "decode-of-many-queries-a-head": Case(
        heads=11, kv_heads=1, k_head_dim=40, v_head_dim=72, query_lens=(1, 1, 9, 1), context_lens=(70, 5, 90, 33)
    ),
    "decode-in-a-window": Case(window=67, sinks=True, query_lens=(1, 1, 1), context_lens=(66, 68, 300), block_size=3),
    "decode-in-huge-blocks": Case(block_size=128, softcap=3.0, query_lens=(1, 1), context_lens=(129, 100)),
    "chunks-of-many-tiles": Case(
        heads=9, kv_heads=3, k_head_dim=64, v_head_dim=64, query_lens=(70, 2, 33, 1), context_lens=(200, 130, 64, 9)
    ),
    "many-queries-a-head": Case(
        heads=71, kv_heads=1, k_head_dim=21, v_head_dim=18, query_lens=(3, 2), context_lens=(67, 2), softcap=3.0
    ),
    "chunks-in-a-window": Case(
        heads=6,
        kv_heads=3,
        k_head_dim=18,
        v_head_dim=13,
        query_lens=(40, 90),
        context_lens=(300, 140),
        window=67,
        block_size=5,
        sinks=True,
        softcap=1.0,
    ),
    "single-token-prompt": Case(query_lens=(1,), context_lens=(1,), block_size=32, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_paged_attention_equals_its_definition(name: str) -> None:
    inputs = make(CASES[name])
    torch.testing.assert_close(compute(CASES[name], inputs).double(), expected(CASES[name], inputs), rtol=0, atol=4e-6)


@pytest.mark.parametrize("window", [None, 3, 11, 30])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_chunk_of_many_tiles_equals_its_definition(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kernels.attention_cpu.TILE_SCORES", 1)
    case = Case(query_lens=(3 * TILE + 1, TILE), context_lens=(4 * TILE, TILE), window=window, sinks=sinks)
    inputs = make(case)
    torch.testing.assert_close(compute(case, inputs).double(), expected(case, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    case = Case(dtype=dtype, window=9, softcap=3.0, sinks=True)
    inputs = make(case)
    result = compute(case, inputs)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected(case, inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", [Case(), Case(window=6), Case(sinks=True, softcap=2.0)])
def test_a_sequence_gives_the_same_bits_alone_and_beside_others(case: Case) -> None:
    inputs = make(case)
    together = compute(case, inputs).split(list(case.query_lens))
    rows = inputs.q.split(list(case.query_lens))
    for i, part in enumerate(together):
        alone = replace(
            inputs.batch,
            query_lens=[case.query_lens[i]],
            context_lens=[case.context_lens[i]],
            block_tables=inputs.batch.block_tables[i : i + 1],
        )
        assert torch.equal(compute(case, inputs, alone, rows[i]), part)


@pytest.mark.parametrize("case", [Case(), Case(window=70, sinks=True, softcap=2.0)])
def test_where_a_prompt_is_cut_does_not_change_a_bit(case: Case, version: str) -> None:
    """Only in C, and but for a chunk of one token, which is computed as a step of decoding is."""
    if version == "torch":
        pytest.skip("torch orders its sums by the shape of the whole")
    case = replace(case, heads=6, query_lens=(230,), context_lens=(230,))
    inputs = make(case)
    whole = compute(case, inputs)
    for cuts in ([0, 64, 230], [0, 2, 19, 130, 197, 230]):
        for start, end in itertools.pairwise(cuts):
            batch = replace(inputs.batch, query_lens=[end - start], context_lens=[end])
            assert torch.equal(compute(case, inputs, batch, inputs.q[start:end]), whole[start:end])


@pytest.mark.parametrize("query_len", [1, 5])
def test_where_the_blocks_lie_does_not_change_a_bit(query_len: int) -> None:
    case = Case(query_lens=(query_len,), context_lens=(150,))
    inputs = make(case)
    order = torch.randperm(len(inputs.k_cache), generator=torch.Generator().manual_seed(9))
    moved = Inputs(inputs.q, inputs.k_cache[order], inputs.v_cache[order], inputs.batch, None)
    places = torch.argsort(order)
    batch = replace(inputs.batch, block_tables=places[inputs.batch.block_tables])
    assert torch.equal(compute(case, moved, batch), compute(case, inputs))


def test_layers_of_different_shapes_and_windows_share_a_step() -> None:
    batch = make(Case()).batch
    cases = [Case(window=5), Case(k_head_dim=8, v_head_dim=12), Case(), Case(window=2), Case(heads=6, kv_heads=3)]
    for case in (*cases, *reversed(cases)):
        inputs = make(case)  # from the same seed: other values, the same block tables
        assert torch.equal(inputs.batch.block_tables, batch.block_tables)
        assert torch.equal(compute(case, inputs, batch), compute(case, inputs))


def test_queries_and_sinks_may_lie_in_any_order_in_memory() -> None:
    case = Case(query_lens=(1, 1, 1), context_lens=(33, 29, 1), sinks=True)
    inputs = make(case)
    dense = compute(case, inputs)
    wide = torch.randn(3, 9, 16)
    wide[:, 2:6] = inputs.q
    assert inputs.sinks is not None
    inputs.sinks = torch.stack([inputs.sinks, inputs.sinks], dim=1)[:, 0]
    for q in (wide[:, 2:6], inputs.q.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(compute(case, inputs, q=q), dense, rtol=0, atol=1e-6)


def test_a_sequence_whose_kv_is_nan_spoils_no_other() -> None:
    case = Case(query_lens=(1, 1, 1), context_lens=(33, 29, 70))
    inputs = make(case)
    whole = compute(case, inputs)
    inputs.k_cache[inputs.batch.block_tables[1, 0]] = float("nan")
    spoilt = compute(case, inputs)
    assert spoilt[1].isnan().any()
    assert torch.equal(spoilt[[0, 2]], whole[[0, 2]])


def test_the_definition_equals_torchs_attention() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(9, heads, 6, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    ours = attend_by_definition(q, k, v, scale=0.4, window=None, softcap=None, sinks=None)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.4, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(0, 1))
