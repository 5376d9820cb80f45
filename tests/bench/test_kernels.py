"""`pdserve bench kernels`: figures of a tiny model, and one JSON line at the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pdserve.bench.__main__ import main
from tests.system.tiny_model import write_tiny_llama


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_every_figure_is_measured_and_the_last_line_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_tiny_llama(tmp_path, 1)
    few = ("--seconds", "0.01", "--rows", "1,3", "--context", "20", "--attention-contexts", "16,100")
    assert main(["kernels", "--model", str(directory), *few]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["limits"].keys() == {"read_gb_s", "copy_gb_s", "gemm_gflop_s"}
    assert [row["rows"] for row in result["linear"]] == [1, 3]
    assert [row["rows"] for row in result["step"]] == [1, 3]
    assert [row["context_tokens"] for row in result["attention"]] == [16, 100]
    figures = [*result["linear"], *result["attention"], *result["step"], result["prompt"], result["limits"]]
    assert all(value > 0 for figure in figures for value in figure.values())
    assert [row["what"] for row in result["quantized"]] == ["1 rows", "3 rows", "prompt"]
    assert all(row["int8_share"] == row["int8_ms"] / row["float32_ms"] > 0 for row in result["quantized"])
    assert all(row["int4_share"] == row["int4_ms"] / row["float32_ms"] > 0 for row in result["quantized"])


@pytest.mark.parametrize(
    "flags", [["--rows", "1,x"], ["--rows", "0"], ["--seconds", "0"], ["--context", "0"], ["--attention-contexts", ""]]
)
def test_what_cannot_be_measured_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
