"""Matrix products in C: right on odd shapes, at every instruction set, and to the bit the same whatever the batch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from pdserve.kernels import linear as linear_module
from pdserve.kernels.linear import linear

SHAPES = [(1, 1, 1), (1, 9, 16), (2, 3, 5), (3, 8, 33), (5, 17, 64), (7, 23, 579), (13, 4, 8), (64, 40, 100)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "library" in request.fixturenames:
        library = request.getfixturevalue("library")
        monkeypatch.setattr(linear_module, "native", lambda: library)


@pytest.mark.parametrize(("rows", "outs", "k"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_product_equals_that_of_double_precision(
    library: ctypes.CDLL, rows: int, outs: int, k: int, biased: bool
) -> None:
    x, weight = random(rows, k), random(outs, k, seed=1)
    bias = random(outs, seed=2) if biased else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, rtol=0, atol=2e-6 * k**0.5 + 1e-6)


@pytest.mark.parametrize(("outs", "k"), [(50, 97), (16, 4096)])
def test_a_row_gives_the_same_bits_in_any_batch(library: ctypes.CDLL, outs: int, k: int) -> None:
    x, weight = random(150, k), random(outs, k, seed=1)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(len(x))])
    for rows in (*range(2, 20), 31, 32, 33, 49, 150):
        assert torch.equal(linear(x[:rows], weight), alone[:rows]), rows


def test_a_row_of_nan_stays_alone(library: ctypes.CDLL) -> None:
    x, weight = random(6, 40), random(10, 40, seed=1)
    expected = linear(x, weight)
    x[2] = float("nan")
    found = linear(x, weight)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_rows_may_lie_apart_and_have_more_dimensions(library: ctypes.CDLL) -> None:
    wide, weight = random(2, 5, 70), random(12, 33, seed=1)
    part = wide[..., 7:40]
    assert torch.equal(linear(part, weight), linear(part.contiguous(), weight))
    flipped = random(33, 5).T
    assert torch.equal(linear(flipped, weight), linear(flipped.contiguous(), weight))
    assert linear(part, weight).shape == (2, 5, 12)
    assert linear(part[:, :0], weight).shape == (2, 0, 12)


def test_a_part_of_a_weight_is_a_weight(library: ctypes.CDLL) -> None:
    x, weight = random(3, 32), random(20, 32, seed=1)
    assert torch.equal(linear(x, weight[5:12]), linear(x, weight)[:, 5:12])
    columns = weight[:, 3:19]  # not contiguous: left to torch
    torch.testing.assert_close(linear(x[:, :16], columns), x[:, :16] @ columns.T)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 40])
def test_without_the_kernels_torch_gives_the_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "native", lambda: None)
    x, weight, bias = random(1, rows, 30), random(11, 30, seed=1), random(11, seed=2)
    for b in (None, bias):
        torch.testing.assert_close(linear(x, weight, b), torch.nn.functional.linear(x, weight, b))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    x, weight = random(5, 30).to(dtype), random(11, 30, seed=1).to(dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
