"""`pdserve bench helped`: figures of a tiny model, and one JSON line at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdserve.bench.__main__ import main
from pdserve.kernels.library import native
from tests.system.tiny_model import write_tiny_llama


@pytest.mark.skipif(native() is None, reason="there are no kernels in C")
def test_steps_are_measured_with_and_without_a_helper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    cores = ("--core", str(min(before)), "--helper-core", str(max(before)))
    few = ("--seconds", "0.01", "--rows", "1,3", "--context", "20", "--prompt", "300")
    try:
        assert main(["helped", "--model", str(write_tiny_llama(tmp_path, 1)), *cores, *few]) == 0
    finally:
        os.sched_setaffinity(0, before)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["what"] for row in result["results"]] == ["step of 1 rows", "step of 3 rows", "prompt of 300"]
    assert all(row["alone_ms"] > 0 and row["helped_ms"] > 0 and row["ratio"] > 0 for row in result["results"])


@pytest.mark.parametrize("flags", [["--rows", "1,x"], ["--rows", "0"], ["--core", "999"]])
def test_what_cannot_be_measured_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["helped", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
