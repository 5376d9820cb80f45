"""The largest number of every row, in C at every instruction set, as torch finds it."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from pdserve.kernels import greedy
from pdserve.kernels.greedy import largest


@pytest.fixture(autouse=True)
def kernels(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "native", lambda: library)


@pytest.mark.parametrize("width", [1, 3, 4, 16, 17, 31, 100, 49152, 50001])
def test_it_is_the_one_that_torch_finds(width: int) -> None:
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    x[1] = -x[1].abs() - 1.0
    values, places = x.max(dim=1)
    assert largest(x) == (values.tolist(), places.tolist())
    assert largest(x[:, : width - width // 3]) == tuple(part.tolist() for part in x[:, : width - width // 3].max(dim=1))


@pytest.mark.parametrize("first", range(40))
def test_of_equals_the_first_counts(first: int) -> None:
    x = torch.zeros(1, 77)
    x[0, first::7] = 2.5
    assert largest(x) == ([2.5], [first])


@pytest.mark.parametrize("place", [0, 5, 16, 40, 42])
def test_what_is_not_finite_shows(place: int) -> None:
    x = torch.randn(3, 43, generator=torch.Generator().manual_seed(0))
    x[0, place], x[1, place], x[2] = torch.nan, torch.inf, -torch.inf
    values, places = largest(x)
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]
    assert places[1:] == [place, 0]


def test_there_may_be_no_row() -> None:
    assert largest(torch.empty(0, 5)) == ([], [])
