"""`pdserve bench transfer` on tiny prompts: every link between two real processes, through the pools' own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.__main__ import main
from pdserve.bench.errors import BenchError
from pdserve.bench.transfer import copy_gb_s, parse
from pdserve.bench.transfer_ends import (
    Job,
    Sender,
    layout_of,
    layout_of_model,
    most_in_flight,
    receiving_process,
)
from pdserve.engine.kv_cache import KVCache
from tests.system.tiny_model import write_tiny_llama

TINY = layout_of(3, 2, 16, "float32")


def test_links_are_measured_and_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    links = ["shm", "zmq tcp"]  # zmq ipc is used below
    flags = ("--layout", "3x2x16:bfloat16", "--prompt-tokens", "50", "--chunk-tokens", "20", "--seconds", "0.05")
    assert main(["transfer", *flags, "--links", ",".join(links)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert [row["link"] for row in result["results"]] == links
    assert {row["layer_kib"] for row in result["results"]} == {20 * 128 / 1024}
    assert result["memcpy_gb_s"].keys() == {str(20 * 128)}
    positive = ("gb_s", "share", "sender_gb_s", "receiver_gb_s", "ship_ms", "tail_ms")
    assert all(row[name] > 0 for row in result["results"] for name in positive)
    assert [row["by_frame"] for row in result["results"]] == [0, 0]
    assert "memcpy" in "\n".join(lines[:-1])


def test_every_byte_of_every_prompt_has_arrived_checked(tmp_path: Path) -> None:
    job = Job("shm", TINY, prompt_tokens=33, chunk_tokens=16, cache_bytes=1 << 20)
    with receiving_process(job, str(tmp_path), 0) as pipe:
        sender = Sender(pipe, job)
        try:
            sender.connect()
            moved = sender.run(in_flight=3, seconds=0.01, min_prompts=7)
            assert sender._link.bytes_sent == (moved.num_prompts + 1) * job.prompt_bytes  # and one to warm up
        finally:
            sender.close()
    assert moved.num_prompts >= 7
    assert moved.num_bytes == moved.num_prompts * 33 * 3 * 2 * 2 * 16 * 4
    assert min(moved.wall_s, moved.ship_s, moved.tail_s) > 0


def test_a_corrupt_slab_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = KVCache.gather
    monkeypatch.setattr(KVCache, "gather", lambda *place: (gather(*place)[0], 1))
    job = Job("zmq ipc", TINY, prompt_tokens=16, chunk_tokens=16, cache_bytes=1 << 20)
    with receiving_process(job, str(tmp_path), 0) as pipe:
        sender = Sender(pipe, job)
        try:
            sender.connect()
            with pytest.raises(BenchError, match="died"):
                sender.run(1, 0.01, 1)
        finally:
            sender.close()


def test_what_is_under_way_fits_the_ring() -> None:
    assert most_in_flight("shm", 10 << 20) == 4
    assert most_in_flight("shm", 1 << 30) == 1
    assert most_in_flight("shm", 1) == 8


def test_the_layout_of_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, 1, num_layers=3)
    assert layout_of_model(tmp_path) == TINY
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    with pytest.raises(BenchError, match="--layout"):
        layout_of_model(tmp_path)


def test_a_plain_copy_is_faster_than_nothing() -> None:
    assert copy_gb_s(1 << 20, 0.01) > 0


@pytest.mark.parametrize(
    "flags",
    [["--links", "shm,rdma"], ["--chunk-tokens", "600"], ["--layout", "3x2:float32"], ["--layout", "0x2x2:float32"],
     ["--seconds", "0"], ["--url", "nowhere"]],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((BenchError, SystemExit)) as raised:
        parse(flags)
    assert flags[0] in str(raised.value) + capsys.readouterr().err
