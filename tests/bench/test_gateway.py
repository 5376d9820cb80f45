"""`bench gateway` as a user runs it: a real gateway, workers that answer from memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.gateway import main, parse_options
from pdserve.bench.memory_worker import number_of, prompt_of
from tests.system.tiny_model import write_tiny_llama


def test_every_token_is_counted_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_tiny_llama(tmp_path, 1)
    arguments = ["--model", str(directory), "--connections", "10", "--workers", "3", "--step-ms", "40"]
    assert main([*arguments, "--seconds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [load["connections"] for load in result["loads"]] == [10, 2]
    for load in result["loads"]:
        assert load["broken"] == 0
        assert load["tokens_per_s"] > 0
        assert load["cpu_us_per_token"] > 0
        assert 0 < load["added_p50_ms"] <= load["added_p99_ms"]


def test_a_prompt_says_which_request_it_is() -> None:
    assert [number_of(prompt_of(number)) for number in (0, 1, 199, 200, 12_345)] == [0, 1, 199, 200, 12_345]


def test_odd_options_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse_options(["--connections", "0"])
