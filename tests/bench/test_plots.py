"""Plots are readable PNG files, and without matplotlib one line says what to install."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.plots import plot_bars, plot_lines, require_plots

POINTS = [(0.5, 10.0), (1.0, 12.0), (2.0, 300.0)]


def size_of(png: Path) -> tuple[int, int]:
    """Width and height, after every chunk was found whole."""
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_lines_and_bars_become_png_files_with_something_on_them(tmp_path: Path) -> None:
    from matplotlib.image import imread

    panels = {"TTFT, ms": {"split p50": POINTS, "split p99": POINTS}, "empty": {"split": []}, "odd": {"a": POINTS}}
    lines = plot_lines(tmp_path / "lines.png", "title", "requests/s", panels, {"TTFT, ms": 100.0}, log=["TTFT, ms"])
    bars = plot_bars(
        tmp_path / "bars.png", "title",
        {"first": {"ttft": {"split": 1.0}}, "second": {"tpot": {"split": 2.0, "other": 3.0}, "ttft": {"other": 1.0}}},
    )  # fmt: skip
    for png in (lines, bars):
        width, height = size_of(png)
        image = imread(png)
        assert image.shape[:2] == (height, width)
        assert min(width, height) > 300
        assert image[..., :3].std() > 0.05


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BenchError, match="--plots"):
        require_plots(file)
    with pytest.raises(BenchError, match="cannot write"):
        plot_bars(tmp_path / "none" / "x.png", "", {"a": {"b": {"c": 1.0}}})


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pdserve\[bench\]"):
        require_plots(tmp_path)
