"""What the device check says of Triton's kernels, interpreted here: what is wrong is found."""

from __future__ import annotations

import pytest
import torch

from pdserve.bench import device_kernels, device_rows
from pdserve.bench.device_report import Check, Setting
from pdserve.kernels import rows
from tests.kernels.interpreted import attention_triton, interpreting

__all__ = ["interpreting"]  # the fixture
pytestmark = pytest.mark.usefixtures("interpreting")
DRY = Setting(torch.device("cpu"), dry=True)


def wrong(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if not check.ok}


def test_attention_with_scores_of_another_scale_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "LOG2_E", 1.0)
    found = wrong(list(device_kernels.run(DRY)))
    assert {"tiny, float32: equals float64", "tiny, cache in int8: equals float64"} <= found


def test_rows_that_are_cut_short_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_power_of_2", lambda size: 2)
    found = wrong(list(device_rows.run(DRY)))
    assert "norms, float32: equal float64" in found
    assert "gates, float32: equal float64" not in found
