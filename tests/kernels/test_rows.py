"""Norms, rotary positions and gates in Triton, under its interpreter, against torch, on odd sizes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels import rows, triton_choice
from pdserve.kernels.decoder_layer import Norm
from tests.kernels.interpreted import interpreting

__all__ = ["interpreting"]  # the fixture
pytestmark = pytest.mark.usefixtures("interpreting")
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3}


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def both(function: object, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """What Triton says, and what torch does in float64."""
    expected = function(*(tensor.double() for tensor in tensors))
    with triton_choice.interpreting():
        return function(*tensors), expected


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 48), (5, 64), (2, 100)])
def test_normed_rows(num_rows: int, size: int, dtype: torch.dtype) -> None:
    wide = random(num_rows, size + 7, dtype=dtype)
    found, expected = both(
        lambda x, weight: rows.normed_rows(x[:, :size], Norm(weight, 1e-5)),
        wide,
        random(size, dtype=dtype),
    )
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 48), (2, rows.GATE_BLOCK + 3)])
def test_gated_rows(num_rows: int, size: int, dtype: torch.dtype) -> None:
    found, expected = both(rows.gated_rows, 3 * random(num_rows, 2 * size, dtype=dtype))
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_a_gate_far_below_zero_closes() -> None:
    joined = torch.tensor([[-200.0, 200.0, 3.0, 4.0]])
    assert rows.gated_rows(joined).tolist() == [[0.0, 800.0]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"), [(4, 2, 8, 8), (3, 1, 12, 12), (2, 2, 20, 6), (6, 2, 64, 64)]
)
def test_turned_heads(
    heads: int, kv_heads: int, head_dim: int, rotary: int, normed: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    angles = random(3, rotary // 2)
    cos, sin = (torch.cat([part, part], dim=1).to(dtype) for part in (angles.cos(), angles.sin()))
    weights = random(2, head_dim, dtype=dtype)

    def turn(qkv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor) -> Tensor:
        qkv = qkv.clone()
        norms = (Norm(weights[0], 1e-6), Norm(weights[1], 1e-2)) if normed else (None, None)
        rows.turn_heads(qkv, heads, kv_heads, cos, sin, *norms)
        return qkv

    qkv = random(3, heads + 2 * kv_heads, head_dim, dtype=dtype)
    found, expected = both(turn, qkv, cos, sin, weights)
    tolerance = 3 * TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[:, heads + kv_heads :], qkv[:, heads + kv_heads :]), "v is left alone"
