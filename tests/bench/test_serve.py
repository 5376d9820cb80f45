"""The command as a user runs it: a process against a scripted server."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.options import parse_options
from tests.bench.command import bench, start

PROCESS_TIMEOUT_S = 60


async def test_the_last_line_is_json_and_agrees_with_the_requests_written(
    server: Any, script: Any, tmp_path: Path
) -> None:
    server.behaviours = [script.complete()]
    output = tmp_path / "requests.jsonl"
    code, lines, _ = await bench(
        *("serve", "--url", server.url + "/v1/", "--concurrency", "3", "--num-requests", "12", "--warmup", "2"),
        *("--input-tokens", "24", "--output-tokens", "5", "--prefix-tokens", "16", "--seed", "9"),
        *("--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000", "--output", str(output)),
    )
    assert code == 0
    result = json.loads(lines[-1])
    assert len(server.bodies) == 14
    assert all(body["model"] == "tiny" and len(body["prompt"]) == 24 for body in server.bodies)
    assert len({tuple(body["prompt"][:16]) for body in server.bodies}) == 1
    assert (result["num_ok"], result["num_failed"], result["errors"]) == (12, 0, {})
    assert (result["input_tokens"], result["output_tokens"], result["cached_tokens"]) == (12 * 24, 12 * 5, 0)
    assert (result["ttft_ms"]["count"], result["itl_ms"]["count"]) == (12, 12 * 4)
    assert result["goodput"]["share"] == 1
    assert result["scheduled_ttft_ms"] is None
    assert (result["seed"], result["model"], result["mode"]) == (9, "tiny", "concurrency")
    assert result["machine"]["cores"] >= 1
    assert result["output_tokens_per_s"] == pytest.approx(60 / result["duration_s"], rel=1e-3)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(12))
    assert max(record["ttft_ms"] for record in records) == pytest.approx(result["ttft_ms"]["max"], abs=0.01)
    text = "\n".join(lines)
    assert all(name in text for name in ("TTFT", "TPOT", "ITL", "goodput", "machine"))


async def test_a_trace_is_replayed_to_length_and_what_does_not_fit_is_said(server: Any, tmp_path: Path) -> None:
    server.max_model_len = 64
    trace = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 36, "output_length": 2, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 100, "output_length": 4, "hash_ids": [0, 4, 5, 6, 7, 8, 9]},
    ]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    code, lines, err = await bench(
        "serve", "--url", server.url, "--trace", str(trace), "--speed", "30", "--warmup", "0", "--log-json"
    )
    assert code == 0
    assert sorted((len(b["prompt"]), b["max_tokens"]) for b in server.bodies) == [(36, 2), (40, 3), (60, 4)]
    by_length = {len(body["prompt"]): body["prompt"] for body in server.bodies}
    assert by_length[40][:32] == by_length[36][:32]
    assert by_length[40][:16] == by_length[60][:16] != by_length[60][16:32]
    note = json.loads(err.splitlines()[0])
    assert note["level"] == "warning"
    assert "1 of 3 trace requests are clipped" in note["message"]
    result = json.loads(lines[-1])
    assert (result["num_clipped"], result["num_ok"], result["mode"]) == (1, 3, "trace")
    assert result["scheduled_ttft_ms"]["count"] == result["send_lag_ms"]["count"] == 3
    assert result["duration_s"] >= 0.1


async def test_an_interrupt_reports_what_there_is(server: Any, script: Any) -> None:
    second = asyncio.Event()

    async def stuck(request: Any, body: Any) -> Any:
        second.set()
        return await script.stream(request, [script.chunk([1]), 60.0])

    server.behaviours = [script.complete(), stuck]
    process = await start("serve", "--url", server.url, "--concurrency", "1", "--warmup", "0", "--num-requests", "5")
    await asyncio.wait_for(second.wait(), PROCESS_TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), PROCESS_TIMEOUT_S)
    assert process.returncode == 130
    assert b"Traceback" not in err
    result = json.loads(out.decode().splitlines()[-1])
    assert (result["interrupted"], result["num_ok"], result["num_interrupted"], result["num_failed"]) == (True, 1, 1, 0)


async def test_a_run_in_which_nothing_succeeds_still_reports_and_exits_1(server: Any, script: Any) -> None:
    server.behaviours = [lambda request, body: script.stream(request, [script.chunk([1])])]
    code, lines, err = await bench("serve", "--url", server.url, "--rate", "100", "--num-requests", "3")
    assert code == 1
    assert "1 of 1 warm-up requests failed: truncated" in err
    result = json.loads(lines[-1])
    assert result["errors"] == {"truncated": 3}
    assert result["ttft_ms"] is None
    assert any("3 x truncated" in line for line in lines)


async def test_what_cannot_run_is_one_line_and_exit_2(server: Any, unused_port: int, tmp_path: Path) -> None:
    bad_trace = tmp_path / "trace.csv"
    bad_trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n")
    commands = [
        (["--url", f"http://127.0.0.1:{unused_port}", "--concurrency", "1"], "cannot reach"),
        (["--url", server.url, "--trace", str(bad_trace)], f"{bad_trace}:2: "),
        (["--url", server.url, "--concurrency", "1", "--input-tokens", "5000"], "context of 4096"),
        (["--url", server.url, "--concurrency", "1", "--output", str(tmp_path / "no" / "file")], "cannot write"),
    ]
    results = await asyncio.gather(*(bench("serve", *arguments) for arguments, _ in commands))
    for (_, expected), (code, lines, err) in zip(commands, results, strict=True):
        assert (code, lines) == (2, [])
        assert len(err.splitlines()) == 1
        assert err.startswith("pdserve.bench: error: ")
        assert expected in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--concurrency 1 --speed 2", "--speed has no effect with --concurrency"),
        ("--concurrency 1 --arrival uniform", "--arrival has no effect with --concurrency"),
        ("--trace t --input-tokens 5", "--input-tokens has no effect with --trace"),
        ("--rate 1 --trace-block-tokens 5", "--trace-block-tokens has no effect with --rate"),
        ("--rate 1 --input-tokens 5 --prefix-tokens 6", "must not exceed"),
        ("--rate 1 --tokenizer t --token-ids 1:2", "exclude each other"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_options(["--url", "http://localhost:1", *arguments.split()])


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--concurrency 1 --rate 1",
        "--concurrency 0",
        "--rate 0",
        "--rate nan",
        "--rate inf",
        "--rate 1 --num-requests -3",
        "--rate 1 --token-ids 7:3",
        "--rate 1 --url ftp://x",
        "--rate 1 --url http://x:port",
    ],
)
def test_a_bad_value_is_a_usage_error(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_options(["--url", "http://localhost:1", *arguments.split()])
    assert error.value.code == 2
    assert "error: " in capsys.readouterr().err
