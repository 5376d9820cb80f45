"""KV in int8: the same bytes from C and from torch, attention over them, and slabs that carry their scales."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kernels import attention_native
from pdserve.kernels.attention import paged_attention
from pdserve.kernels.attention_reference import paged_attention_reference
from pdserve.kernels.cache_ops import gather, scatter, write_kv
from pdserve.kernels.kv_int8 import Scales, dequantise, quantise
from pdserve.kernels.library import open_library
from tests.kernels.conftest import RUNNABLE
from tests.kernels.test_attention import Case, Inputs, make

Caches = tuple[Tensor, Tensor, Scales]


@pytest.fixture(params=[*RUNNABLE, "torch"], autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "torch" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    library: ctypes.CDLL | None = None if request.param == "torch" else open_library(request.param)
    monkeypatch.setattr(attention_native, "native", lambda: library)
    return str(request.param)


def empty(blocks: int, block_size: int, kv_heads: int, k_dim: int, v_dim: int) -> Caches:
    """Bytes that mean nothing, and scales that would show."""
    k, v = (torch.full((blocks, block_size, kv_heads, dim), 77, dtype=torch.int8) for dim in (k_dim, v_dim))
    k_scales, v_scales = (torch.full((blocks, block_size, kv_heads), torch.nan) for _ in range(2))
    return k, v, (k_scales, v_scales)


def quantised(inputs: Inputs) -> Caches:
    """The caches of `inputs` in int8; what is NaN there, because it is no token, stays NaN."""
    (k, k_scales), (v, v_scales) = quantise(inputs.k_cache), quantise(inputs.v_cache)
    return k, v, (k_scales, v_scales)


@pytest.mark.parametrize("dims", [(1, 3), (16, 17), (64, 64), (100, 40)])
def test_rows_become_the_same_bytes_and_scales_everywhere(dims: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 3, dim, generator=generator) * 10 ** torch.arange(-2.0, 3)[:, None, None] for dim in dims)
    k[1, 2] = 0.0
    k[3, 0, 0], v[4, 1, 0] = torch.nan, torch.inf
    slots = torch.tensor([7, 0, 11, 3, 4])
    k_cache, v_cache, scales = empty(4, 3, 3, *dims)
    write_kv(k_cache, v_cache, k, v, slots, scales)
    for cache, plane, part in ((k_cache, scales[0], k), (v_cache, scales[1], v)):
        values, sizes = quantise(part)
        assert torch.equal(cache.flatten(0, 1)[slots], values)
        torch.testing.assert_close(plane.flatten(0, 1)[slots], sizes, rtol=0, atol=0, equal_nan=True)
        assert int((cache.flatten(0, 1) == 77).all(2).all(1).sum()) >= 7, "other slots were touched"
        found, finite = dequantise(values, sizes), part.isfinite().all(2)
        assert torch.equal(found.isnan().any(2), ~finite)
        assert ((found - part).abs().amax(2) <= part.abs().amax(2) / 253)[finite].all()


def test_many_rows_become_the_same_bytes_everywhere() -> None:
    """Values that lie between two steps, of many scales: what rounds once more than in C shows in a few of them."""
    ranges = torch.rand(300_000, generator=torch.Generator().manual_seed(0)) + 0.5
    rows = torch.stack([ranges, ranges * 63.5 / 127, ranges * 0.5 / 127, ranges * -1.5 / 127], dim=1)[:, None]
    k_cache, v_cache, scales = empty(len(rows), 1, 1, 4, 4)
    write_kv(k_cache, v_cache, rows, rows, torch.arange(len(rows)), scales)
    inverse = np.float32(127) / ranges.numpy()
    expected = torch.from_numpy(np.rint(rows.numpy() * inverse[:, None, None])).to(torch.int8)
    for cache, plane in ((k_cache, scales[0]), (v_cache, scales[1])):
        assert torch.equal(cache.view(-1, 1, 4), expected)
        assert np.array_equal(plane.flatten().numpy(), ranges.numpy() / np.float32(127))


CASES = {
    "plain": Case(),
    "odd-heads": Case(heads=9, kv_heads=3, k_head_dim=5, v_head_dim=5, block_size=3),
    "no-grouping": Case(heads=3, kv_heads=3, k_head_dim=24, v_head_dim=24),
    "latent": Case(heads=4, kv_heads=4, k_head_dim=24, v_head_dim=17, block_size=3),
    "everything": Case(heads=6, k_head_dim=7, v_head_dim=9, block_size=3, window=6, softcap=2.0, sinks=True),
    "decode-of-many-lengths": Case(
        heads=9, kv_heads=3, k_head_dim=64, v_head_dim=64, query_lens=(1,) * 5, context_lens=(1, 63, 64, 65, 200)
    ),
    "many-queries-a-head": Case(
        heads=11, kv_heads=1, k_head_dim=40, v_head_dim=72, query_lens=(1, 3, 9, 1), context_lens=(70, 5, 90, 33)
    ),
    "chunks-of-many-tiles": Case(heads=6, kv_heads=2, query_lens=(70, 2, 33, 1), context_lens=(200, 130, 64, 9)),
    "chunks-in-a-window": Case(query_lens=(40, 90), context_lens=(300, 140), window=67, block_size=5, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_over_bytes_equals_its_definition_over_what_they_mean(name: str) -> None:
    case, inputs = CASES[name], make(CASES[name])
    k, v, scales = quantised(inputs)
    settings = {"scale": 0.3, "window": case.window, "softcap": case.softcap}
    found = paged_attention(inputs.q, k, v, inputs.batch, **settings, sinks=inputs.sinks, scales=scales)  # type: ignore[arg-type]
    expected = paged_attention_reference(
        inputs.q.double(), dequantise(k, scales[0]).double(), dequantise(v, scales[1]).double(),
        query_lens=list(case.query_lens), context_lens=list(case.context_lens),
        block_tables=inputs.batch.block_tables, **settings,  # type: ignore[arg-type]
        sinks=None if inputs.sinks is None else inputs.sinks.double(),
    )  # fmt: skip
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_slab_carries_the_scales_behind_the_bytes(read_only: bool) -> None:
    source, target = empty(4, 3, 2, 5, 7), empty(3, 5, 2, 5, 7)
    slots, other = torch.tensor([7, 0, 11]), torch.tensor([1, 14, 6])
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(3, 2, 5, generator=generator), torch.randn(3, 2, 7, generator=generator)
    write_kv(*source[:2], k, v, slots, source[2])
    slab = torch.empty(3 * 2 * (5 + 7 + 8), dtype=torch.uint8)
    gather(*source[:2], slots, slab, source[2])
    (k_bytes, k_scales), (v_bytes, v_scales) = quantise(k), quantise(v)
    expected = b"".join(part.numpy().tobytes() for part in (k_bytes, v_bytes, k_scales, v_scales))
    assert slab.numpy().tobytes() == expected
    payload = memoryview(expected) if read_only else memoryview(slab.numpy())
    scatter(*target[:2], other, payload, target[2])
    again = torch.empty_like(slab)
    gather(*target[:2], other, again, target[2])
    assert torch.equal(again, slab)
