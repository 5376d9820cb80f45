"""`bench steady` against a scripted server, and how windows are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.bench.steady import Window, compare, main, parse_options
from tests.bench.command import bench


async def test_every_window_is_reported(server: Any, script: Any) -> None:
    server.behaviours = [script.complete()]
    code, lines, _ = await bench(
        *("steady", "--url", server.url, "--num-requests", "25", "--window", "10", "--concurrency", "3"),
        *("--input-tokens", "4", "--output-tokens", "3"),
    )
    assert code == 0
    result = json.loads(lines[-1])
    assert [window["requests"] for window in result["windows"]] == [10, 20, 25]
    assert all(window["failed"] == 0 and window["ttft_p50_ms"] > 0 for window in result["windows"])
    assert "gateway" in result["windows"][0]["rss_mib"]
    assert result["windows"][0]["cpu_ms"]["gateway"] >= 0
    assert len(server.bodies) == 25


def window(tpot_ms: float, rss_mib: float, cpu_ms: float = 1.0) -> Window:
    return Window(500, 0, 1.0, 10.0, tpot_ms, {"decode-0": rss_mib}, {"gateway": 1.0, "decode-0": cpu_ms})


def test_the_first_window_is_not_what_the_last_is_compared_with() -> None:
    verdict = compare([window(9.0, 50.0), window(2.0, 100.0), window(2.0, 101.0), window(3.0, 104.0, 2.0)])
    assert verdict["tpot_ratio"] == pytest.approx(1.5)
    assert verdict["cpu_ratio"] == pytest.approx(1.5)
    assert verdict["decode-0_grown_mib"] == pytest.approx(4.0)


@pytest.mark.parametrize("arguments", [["--output-tokens", "1"], ["--window", "0"], []])
def test_odd_options_are_refused(arguments: list[str]) -> None:
    url = ["--url", "http://127.0.0.1:1"] if arguments else []
    with pytest.raises(SystemExit):
        parse_options([*url, *arguments])


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(Exception, match="cannot reach"):
        main(["--url", "http://127.0.0.1:1", "--num-requests", "2"])
