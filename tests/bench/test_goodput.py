"""`pdserve bench goodput` and `bench peers` as a user runs them, against scripted servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from pdserve.bench.errors import BenchError
from pdserve.bench.goodput import parse, workload_of
from tests.bench import command
from tests.bench.command import start
from tests.system.tiny_model import write_tiny_llama

PROCESS_TIMEOUT_S = 90
bench = partial(command.bench, timeout_s=PROCESS_TIMEOUT_S)


def one_at_a_time(script: Any, seconds: float) -> Callable[..., Any]:
    """A server that takes that long for each request and serves one at a time: 1 / seconds is all it can do."""
    turn = asyncio.Lock()

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        async with turn:
            await asyncio.sleep(seconds)
        response: web.StreamResponse = await script.complete()(request, body)
        return response

    return behave


async def test_the_faster_server_wins_and_everything_is_in_the_json_and_the_plot(
    server: Any, other_server: Any, script: Any, tmp_path: Path
) -> None:
    server.behaviours = [one_at_a_time(script, 0.06)]
    other_server.behaviours = [one_at_a_time(script, 0.1)]
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{second:02}.0,{160 + second},32" for second in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    code, lines, err = await bench(
        "goodput", "--server", f"fast={server.url}", "--server", f"slow={other_server.url}", "--server",
        "gone=http://127.0.0.1:9", "--trace", str(trace), "--scale-lengths", "8", "--requests-per-point", "8",
        "--slo-ttft-ms", "400", "--slo-tpot-ms", "400", "--start-rate", "8", "--max-minutes", "0.15", "--seed", "5",
        "--plots", str(tmp_path / "plots"),
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(lines[-1])
    fast, slow = result["servers"]
    assert fast["goodput_per_s"] > slow["goodput_per_s"]
    assert {p["step"] for p in fast["points"]} & {p["step"] for p in slow["points"]}
    assert all(p["num_requests"] == 8 for p in fast["points"])
    (verdict,) = result["verdicts"]
    assert verdict["outcome"] == "wins"
    assert lines[-2].strip() == "So use fast for this workload."
    assert any("gone" in note and "cannot reach" in note for note in result["notes"])
    assert {len(body["prompt"]) for body in server.bodies} <= set(range(20, 26))
    assert {body["max_tokens"] for body in server.bodies} == {4}
    assert (tmp_path / "plots" / "goodput.png").read_bytes().startswith(b"\x89PNG")
    assert any(line.startswith("machine") for line in lines)
    assert any(line.startswith("command") for line in lines)


async def test_limits_are_multiples_of_what_the_first_server_needs_when_idle(server: Any, script: Any) -> None:
    server.behaviours = [script.complete(first_after_s=0.02, gap_s=0.01)]
    code, lines, err = await bench(
        "goodput", "--server", f"only={server.url}", "--requests-per-point", "12", "--output-tokens", "3:5",
        "--max-minutes", "0.05",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(lines[-1])
    assert result["limits"]["ttft_ms"] >= 5 * 19
    assert result["limits"]["tpot_ms"] >= 2 * 9
    assert len(result["servers"][0]["points"]) >= 1
    assert {body["max_tokens"] for body in server.bodies} <= {3, 4, 5}


async def test_no_server_at_all_is_exit_code_1() -> None:
    code, lines, _ = await bench("goodput", "--server", "gone=http://127.0.0.1:9", "--requests-per-point", "2")
    assert code == 1
    assert json.loads(lines[-1])["servers"] == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--scale-lengths", "8"], "--scale-lengths"),
        (["--shape", "a=1p1d", "--shape", "a=0p2d"], "'a'"),
        (["--server", "nonsense"], "--server"),
        (["--input-tokens", "9:2"], "--input-tokens"),
        (["--max-minutes", "0"], "--max-minutes"),
    ],
)
def test_flags_that_cannot_work_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((BenchError, SystemExit)) as raised:
        parse(flags)
    assert named in str(raised.value) + capsys.readouterr().err


def test_a_window_of_a_trace_is_drawn_by_the_seed_and_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 1000 * i, "input_length": 64 * (i + 1), "output_length": 3, "hash_ids": [0] * (4 * (i + 1))}
        for i in range(30)
    ]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    args = parse(["--trace", str(trace), "--scale-lengths", "8", "--requests-per-point", "10"])
    first, again, other = (workload_of(args, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.requests != other.requests
    assert [r.input_tokens % 8 for r in first.requests] == [0] * 10
    assert {r.output_tokens for r in first.requests} == {1}
    assert first.block_tokens == 2
    assert all(len(r.hash_ids) == r.input_tokens / first.block_tokens for r in first.requests)
    with pytest.raises(BenchError, match="--requests-per-point 31"):
        workload_of(parse(["--trace", str(trace), "--requests-per-point", "31"]), 1)


async def test_peers_reports_what_runs_and_says_what_does_not(
    server: Any, other_server: Any, script: Any, tmp_path: Path
) -> None:
    server.behaviours = [script.complete(gap_s=0.005)]
    other_server.behaviours = [*[script.complete()] * 17, script.complete(first_after_s=600)]  # hangs once it is warm
    broken = tmp_path / "llama-server"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('error: no such weights')\n")
    broken.chmod(0o755)
    code, lines, err = await bench(
        "peers", "--server", f"mine={server.url}", "--server", f"hangs={other_server.url}", "--engine", "llama.cpp",
        "--llama-server", str(broken), "--gguf", "none.gguf", "--engine", "vllm", "--scenarios", "a,c", "--reps",
        "1", "--limit-s", "3", "--plots", str(tmp_path), "--model", str(write_tiny_llama(tmp_path / "model", 1)),
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(lines[-1])
    mine, hangs, llama, vllm = result["rows"]
    assert set(mine["figures"]) >= {"a ttft_ms", "c prompt_tok_s"}
    assert hangs["figures"] == llama["figures"] == vllm["figures"] == {}
    assert hangs["notes"] == [f"{scenario}: not done after 3 s" for scenario in "ac"]
    assert "no such weights" in llama["notes"][0]
    assert "--vllm" in vllm["notes"][0]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert "no such weights" in "\n".join(lines[:-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_bench_leaves_no_server_behind(number: signal.Signals, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hanging = tmp_path / "llama-server"
    hanging.write_text(
        f"#!{sys.executable}\nimport os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    hanging.chmod(0o755)
    process = await start(
        "peers", "--engine", "llama.cpp", "--llama-server", str(hanging), "--gguf", "x",
        "--model", str(write_tiny_llama(tmp_path / "model", 1)),
    )  # fmt: skip
    async with asyncio.timeout(PROCESS_TIMEOUT_S):
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.05)
    started = int(pid_file.read_text())
    os.kill(process.pid, number)
    _, err = await asyncio.wait_for(process.communicate(), PROCESS_TIMEOUT_S)
    assert process.returncode == 130, err
    assert not psutil.pid_exists(started)


async def test_without_matplotlib_plots_are_refused_before_a_server_is_touched(server: Any, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from pdserve.bench.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "goodput", "--server", f"a={server.url}", "--plots", str(tmp_path),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), PROCESS_TIMEOUT_S)
    assert process.returncode == 2
    assert "pdserve[bench]" in err.decode()
    assert server.bodies == []
