"""Plots as PNG files. matplotlib is an extra, `pip install 'pdserve[bench]'`: everything else works without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

DPI = 110
BAR_SHARE = 0.8  # of the room of a group


def require_plots(directory: Path) -> None:
    """Before anything is measured: can there be plots in `directory`? Raises BenchError."""
    if find_spec("matplotlib") is None:
        raise BenchError("--plots needs matplotlib: pip install 'pdserve[bench]'; without --plots there are the tables")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--plots {directory}: {error.strerror}") from error


def _grid(title: str, rows: int, columns: int, width: float, height: float) -> tuple[Canvas, list[Axes]]:
    from matplotlib.figure import Figure as Canvas  # here: it is optional, and takes half a second

    canvas = Canvas(figsize=(width, height), layout="constrained")
    canvas.suptitle(title)
    grid = canvas.subplots(rows, columns, squeeze=False)
    return canvas, list(grid.flat)


def _save(canvas: Canvas, path: Path) -> Path:
    try:
        canvas.savefig(path, dpi=DPI)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
    return path


Lines = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]  # panel → line → (x, y)


def plot_lines(
    path: Path, title: str, x_label: str, panels: Lines, limits: Mapping[str, float], log: Sequence[str] = ()
) -> Path:
    """One panel of lines each. `limits`: a level to mark in a panel; `log`: panels with a logarithmic y axis.

    A line whose name ends in ` p99` is dashed and has the colour of the one that ends in ` p50`.
    """
    columns = 2
    canvas, axes = _grid(title, -(-len(panels) // columns), columns, 11, 3.6 * -(-len(panels) // columns))
    colours: dict[str, str] = {}
    for axis, (name, lines) in zip(axes, panels.items(), strict=False):
        for label, points in lines.items():
            owner = label.removesuffix(" p50").removesuffix(" p99")
            colour = colours.setdefault(owner, f"C{len(colours)}")
            dashed = label.endswith(" p99")
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axis.plot(xs, ys, color=colour, linestyle="--" if dashed else "-", marker="o", markersize=3, label=label)
        if name in limits:
            axis.axhline(limits[name], color="grey", linewidth=1, linestyle=":")
        if name in log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set(title=name, xlabel=x_label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    return _save(canvas, path)


def plot_bars(path: Path, title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Path:
    """One panel of grouped bars each: panel → figure → server → value."""
    canvas, axes = _grid(title, len(panels), 1, 10, 2.6 * len(panels))
    servers = list(dict.fromkeys(name for groups in panels.values() for bars in groups.values() for name in bars))
    width = BAR_SHARE / max(len(servers), 1)
    for axis, (name, groups) in zip(axes, panels.items(), strict=True):
        for i, server in enumerate(servers):
            at = [g - BAR_SHARE / 2 + (i + 0.5) * width for g, bars in enumerate(groups.values()) if server in bars]
            heights = [bars[server] for bars in groups.values() if server in bars]
            drawn = axis.bar(at, heights, width, label=server, color=f"C{i}")
            axis.bar_label(drawn, fmt="%.3g", fontsize=6)
        axis.set_title(name)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=7, ncols=max(len(servers), 1))
    return _save(canvas, path)
