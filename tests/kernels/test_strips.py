"""Float32 products in C: right on odd shapes, at every instruction set, to the bit the same whatever the batch; and
weights kept in fewer bytes that give back the very numbers."""

from __future__ import annotations

import ctypes
from typing import get_args

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from pdserve.kernels.pages import Pages
from pdserve.kernels.quantized import CProjection
from pdserve.kernels.strips import Form, StripWeight

SHAPES = [(1, 1, 1), (1, 9, 16), (2, 3, 5), (3, 8, 33), (5, 17, 64), (7, 23, 579), (13, 4, 8), (64, 40, 100)]
FORMS: tuple[Form, ...] = get_args(Form)
NEEDED = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "bytes": 8.5, "nibbles": 5.0}  # bits, scales included


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(form: Form, outs: int, k: int, seed: int = 1) -> Tensor:
    """Numbers that need this form."""
    weight = random(outs, k, seed=seed)
    if form in ("float16", "bfloat16"):
        return weight.to(getattr(torch, form)).float()
    if form == "float32":
        return weight
    columns = torch.arange(-(-k // 32) * 32) % 32
    groups = random(outs, -(-k // 32), seed=seed + 1).repeat_interleave(32, dim=1).half().float()
    if form == "bytes":
        values = (columns * 37 % 255 - 127.0).expand(outs, -1)  # the least among them
        return (groups.abs() * values)[:, :k].contiguous()
    nibbles = (columns * 7 % 16).expand(outs, -1).float()
    weight = groups.abs() * nibbles + (groups * 3).half().float()
    return weight[:, :k].contiguous()


def rows_product(x: Tensor, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL) -> Tensor:
    """With a weight that is not packed."""
    (rows, k), outs = x.shape, len(weight)
    y = x.new_full((rows, outs), float("nan"))
    address = None if bias is None else bias.data_ptr()
    projection = CProjection(kind=32, outs=outs, k=k, data=weight.data_ptr(), bias=address)
    library.pd_linear(ctypes.addressof(projection), x.data_ptr(), k, y.data_ptr(), rows)
    return y


@pytest.mark.parametrize(("rows", "outs", "k"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_product_equals_that_of_double_precision(
    library: ctypes.CDLL, form: Form, rows: int, outs: int, k: int
) -> None:
    x, weight = random(rows, k), weight_of(form, outs, k)
    for bias in (None, random(outs, seed=2)):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = StripWeight(weight, library, Pages()).product(x, bias)
        scale = weight.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=scale * (2e-6 * k**0.5 + 1e-6))
        assert torch.equal(rows_product(x, weight, bias, library), found)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_kept_in_the_shortest_form_of_its_numbers(library: ctypes.CDLL, form: Form) -> None:
    packed = StripWeight(weight_of(form, 128, 320), library, Pages())
    assert packed.form == form
    assert packed.nbytes * 8 == 128 * 320 * NEEDED[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outs", "k"), [(50, 97), (16, 64), (130, 4096)])
def test_a_form_gives_back_the_very_numbers(library: ctypes.CDLL, form: Form, outs: int, k: int) -> None:
    weight = weight_of(form, outs, k)
    packed = StripWeight(weight, library, Pages())
    for rows in (1, 3, 20):  # each a way of its own
        at = torch.linspace(0, k - 1, rows).long()
        ones = torch.eye(k)[at]
        assert torch.equal(packed.product(ones), weight[:, at].T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outs", "k"), [(50, 97), (16, 4096), (300, 64)])
def test_a_row_gives_the_same_bits_in_any_batch_and_form(
    library: ctypes.CDLL, form: Form, outs: int, k: int
) -> None:
    x, weight = random(300, k), weight_of(form, outs, k)
    packed = StripWeight(weight, library, Pages())
    alone = torch.cat([packed.product(x[i : i + 1]) for i in range(40)])
    for rows in (*range(2, 20), 31, 32, 33, 40):
        assert torch.equal(packed.product(x[:rows]), alone[:rows]), rows
    many = packed.product(x)
    assert torch.equal(many[:40], alone)
    for at_least in FORMS:
        assert torch.equal(StripWeight(weight, library, Pages(), at_least).product(x), many), at_least


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_what_a_gguf_file_holds_in_groups_is_kept_in_them(library: ctypes.CDLL, kind: str) -> None:
    numbers = random(64, 256).numpy()
    of_type = GGMLQuantizationType[kind]
    weight = torch.from_numpy(quants.dequantize(quants.quantize(numbers, of_type), of_type))
    packed = StripWeight(weight, library, Pages())
    assert packed.form == ("bytes" if kind == "Q8_0" else "nibbles")
    assert torch.equal(packed.product(torch.eye(256)), weight.T)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 1e30, 1 / 3])
@pytest.mark.parametrize("form", ["float16", "bfloat16", "bytes", "nibbles"])
def test_one_number_that_does_not_fit_keeps_the_weight_longer(
    library: ctypes.CDLL, form: Form, spoilt: float
) -> None:
    weight = weight_of(form, 40, 64)
    weight[33, 50] = spoilt
    packed = StripWeight(weight, library, Pages())
    assert packed.form == "float32"
    torch.testing.assert_close(packed.product(torch.eye(64))[:, :33], weight[:33].T, rtol=0, atol=0)


def test_zeros_and_equal_numbers_are_short(library: ctypes.CDLL) -> None:
    for weight in (torch.zeros(20, 40), torch.full((20, 40), 0.5)):
        packed = StripWeight(weight, library, Pages())
        assert packed.form == "nibbles"
        assert torch.equal(packed.product(torch.eye(40)), weight.T)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_nan_stays_alone(library: ctypes.CDLL, form: Form) -> None:
    x, weight = random(6, 40), StripWeight(weight_of(form, 10, 40), library, Pages())
    expected = weight.product(x)
    x[2] = float("nan")
    found = weight.product(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_rows_may_lie_apart_and_have_more_dimensions(library: ctypes.CDLL) -> None:
    wide, weight = random(2, 5, 70), StripWeight(random(12, 33, seed=1), library, Pages())
    part = wide[..., 7:40]
    assert torch.equal(weight.product(part), weight.product(part.contiguous()))
    flipped = random(33, 5).T
    assert torch.equal(weight.product(flipped), weight.product(flipped.contiguous()))
    assert weight.product(part).shape == (2, 5, 12)
    assert weight.product(part[:, :0]).shape == (2, 0, 12)


def test_a_part_of_a_weight_is_a_weight(library: ctypes.CDLL) -> None:
    x, weight = random(3, 32), random(20, 32, seed=1)
    whole = StripWeight(weight, library, Pages()).product(x)
    assert torch.equal(StripWeight(weight[5:12], library, Pages()).product(x), whole[:, 5:12])
    columns = weight[:, 3:19]  # not contiguous
    torch.testing.assert_close(StripWeight(columns, library, Pages()).product(x[:, :16]), x[:, :16] @ columns.T)
