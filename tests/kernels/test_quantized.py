"""Products with int8 and int4 weights: exact integers on odd shapes, at every instruction set, whatever the batch."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from torch import Tensor

from pdserve.kernels.pages import Pages
from pdserve.kernels.quantized import (
    GROUP,
    QUANTIZATIONS,
    PackedWeight,
    Quantization,
    product_by_definition,
    quantize,
    quantize_rows,
)
from pdserve.kernels.threads import set_helpers

SHAPES = [(1, 1, 1), (1, 70, 16), (2, 3, 5), (3, 8, 33), (5, 17, 64), (7, 131, 579), (13, 4, 8), (40, 66, 100)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: Tensor, kind: Quantization, library: ctypes.CDLL) -> PackedWeight:
    return PackedWeight(quantize(weight, kind), library, Pages())


@pytest.mark.parametrize(("rows", "outs", "k"), SHAPES)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_product_equals_that_of_the_quantised_numbers(
    library: ctypes.CDLL, kind: Quantization, rows: int, outs: int, k: int, biased: bool
) -> None:
    x, weight, bias = random(rows, k), quantize(random(outs, k, seed=1), kind), random(outs, seed=2)
    values, scales = quantize_rows(x)
    exact = (values * scales[..., None].double()).flatten(1)[:, :k] @ weight.dequantized().double().T
    if biased:
        exact += bias
    found = PackedWeight(weight, library, Pages()).product(x, bias if biased else None)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=3e-7 * k)
    by_definition = product_by_definition(x, weight) + (bias if biased else 0.0)
    torch.testing.assert_close(by_definition.double(), exact, rtol=1e-6, atol=3e-7 * k)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_large_value_costs_precision_in_its_own_group_only(library: ctypes.CDLL, kind: Quantization) -> None:
    weight = random(20, 3 * GROUP, seed=1)
    weight[:, GROUP : 2 * GROUP] = 0.0  # what the large value is multiplied by
    x = random(4, 3 * GROUP)
    c = packed(weight, kind, library)
    expected = c.product(x)
    x[:, GROUP + 5] = 1e4
    torch.testing.assert_close(c.product(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_sums_are_exact_at_the_ends_of_the_range(library: ctypes.CDLL, kind: Quantization) -> None:
    """Where an instruction that saturates would show: every product as large as it can be."""
    x = torch.tensor([[127.0], [-127.0]]).expand(2, 4 * GROUP).contiguous()
    weight = torch.tensor([[127.0], [-127.0]] if kind == "int8" else [[15.0], [15.0]]).repeat(3, 4 * GROUP)
    weight[:, ::GROUP] = 0.0  # so that int4 uses its whole range
    assert torch.equal(packed(weight, kind, library).product(x), x @ weight.T)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize(("outs", "k"), [(50, 97), (130, 1600)])
def test_a_row_gives_the_same_bits_in_any_batch(library: ctypes.CDLL, kind: Quantization, outs: int, k: int) -> None:
    weight = packed(random(outs, k, seed=1), kind, library)
    x = random(300, k) * torch.logspace(-3, 3, 300)[:, None]
    alone = torch.cat([weight.product(x[i : i + 1]) for i in range(len(x))])
    for rows in (*range(2, 41), 49, 300):
        assert torch.equal(weight.product(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_helpers_do_not_change_a_bit(library: ctypes.CDLL, kind: Quantization) -> None:
    weight, bias = packed(random(700, 200, seed=1), kind, library), random(700, seed=2)
    x = random(130, 200)
    expected = weight.product(x, bias)
    core = min(os.sched_getaffinity(0))
    try:
        set_helpers(library, [core, core])
        assert all(torch.equal(weight.product(x, bias), expected) for _ in range(20))
    finally:
        set_helpers(library, [])


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_stays_alone(
    library: ctypes.CDLL, kind: Quantization, poison: float
) -> None:
    x, weight = random(6, 40), quantize(random(20, 40, seed=1), kind)
    c = PackedWeight(weight, library, Pages())
    expected = c.product(x)
    x[2, 39] = poison
    for found in (c.product(x), product_by_definition(x, weight)):
        assert found[2].isnan().all()
        others = [0, 1, 3, 4, 5]
        torch.testing.assert_close(found[others], expected[others])


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_rows_of_zeros_and_of_next_to_nothing_are_zeros(library: ctypes.CDLL, kind: Quantization) -> None:
    weight, bias = quantize(random(20, 40, seed=1), kind), random(20, seed=2)
    x = torch.zeros(3, 40)
    x[1] = 1e-40
    x[2] = 3e-37
    assert torch.equal(PackedWeight(weight, library, Pages()).product(x), torch.zeros(3, 20))
    assert torch.equal(PackedWeight(weight, library, Pages()).product(x, bias), bias.expand(3, 20))
    assert torch.equal(product_by_definition(x, weight), torch.zeros(3, 20))


def test_rows_may_lie_apart_and_have_more_dimensions(library: ctypes.CDLL) -> None:
    wide, weight = random(2, 5, 70), packed(random(12, 33, seed=1), "int8", library)
    part = wide[..., 7:40]
    assert torch.equal(weight.product(part), weight.product(part.contiguous()))
    flipped = random(33, 5).T
    assert torch.equal(weight.product(flipped), weight.product(flipped.contiguous()))
    assert weight.product(part).shape == (2, 5, 12)
    assert weight.product(part[:, :0]).shape == (2, 0, 12)


def test_int8_weights_are_off_by_half_a_step_at_most() -> None:
    weight = random(30, 70) * torch.logspace(-6, 6, 30)[:, None]
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((quantize(weight, "int8").dequantized() - weight).abs() <= 0.5001 * steps).all()


@pytest.mark.parametrize("k", [GROUP, 70])
def test_int4_weights_are_off_by_half_a_step_of_their_group_at_most(k: int) -> None:
    weight = random(30, k) * torch.logspace(-2, 2, 30)[:, None] + 0.3
    found = quantize(weight, "int4").dequantized()
    assert found.shape == weight.shape
    for mine, its in zip(found.split(GROUP, dim=1), weight.split(GROUP, dim=1), strict=True):
        step = (its.amax(dim=1, keepdim=True) - its.amin(dim=1, keepdim=True)) / 15
        assert ((mine - its).abs() <= 0.52 * step + 2e-3 * its.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_weights_that_are_all_zero_or_all_alike_stay_so(kind: Quantization) -> None:
    weight = torch.tensor([0.0, 0.5, -2.0])[:, None].expand(3, 50).contiguous()
    torch.testing.assert_close(quantize(weight, kind).dequantized(), weight)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_weight_that_is_not_finite_spoils_its_own_output_alone(library: ctypes.CDLL, kind: Quantization) -> None:
    weight = random(5, 40)
    expected = packed(weight, kind, library).product(random(2, 40))
    weight[3, 7] = float("nan")
    found = packed(weight, kind, library).product(random(2, 40))
    assert found[:, 3].isnan().all()
    others = [0, 1, 2, 4]
    assert torch.equal(found[:, others], expected[:, others])
