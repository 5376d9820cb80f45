"""Who is measured: what the flags mean, and the command lines that come of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pdserve.bench.checkpoint import float32_gguf
from pdserve.bench.contestants import BY_NAME, ENGINES, EngineChoice, Running, Shape, engine, server, shape
from pdserve.bench.errors import BenchError
from pdserve.bench.lineup import contestant_of
from pdserve.bench.peers import parse
from tests.system.tiny_model import write_tiny_llama


def test_flags_name_shapes_servers_and_engines_in_their_order() -> None:
    args = parse(
        ["--engine", "vllm-tuned", "--shape", "a=2p1d", "--server", "b=http://127.0.0.1:9/v1", "--shape", "0p2d"]
    )
    assert args.chosen == [
        EngineChoice(BY_NAME["vllm"], True), Shape("a", 2, 1), Running("b", "http://127.0.0.1:9"), Shape("0p2d", 0, 2),
    ]  # fmt: skip


def test_without_flags_split_and_unsplit_are_measured_beside_the_engines() -> None:
    names = [choice.name for choice in parse([]).chosen]
    assert names[:2] == ["split", "unsplit"]
    assert {"llama.cpp-tuned", "vllm-tuned"} <= set(names)
    assert "transformers" in [choice.name for choice in parse(["--transformers", "x"]).chosen]


@pytest.mark.parametrize(
    ("read", "text"),
    [(shape, "1p"), (shape, "x=1p0d"), (shape, "1p1d2"), (server, "http://x"), (server, "a="), (server, "=http://x"),
     (engine, "sglang"), (engine, "vllm-fast")],
)  # fmt: skip
def test_what_is_malformed_is_refused(read: object, text: str) -> None:
    assert callable(read)
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


@pytest.mark.parametrize(
    "flags", [["--shape", "a=1p1d", "--shape", "a=2p2d"], ["--scenarios", "a,z"], ["--scenarios", ""]]
)
def test_what_cannot_be_measured_is_refused(flags: list[str]) -> None:
    with pytest.raises(BenchError):
        parse(flags)


def test_cores_that_are_not_ours_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--cores", "4000"])
    assert "--cores" in capsys.readouterr().err


async def test_a_shape_is_our_own_command_with_the_flags_of_the_user() -> None:
    args = parse(["--model", "demo", "--up-flags", "--no-prefix-caching --dtype float32"])
    made = await contestant_of(Shape("x", 1, 2), args)
    assert made.launch is not None
    command = made.launch.command
    at = command.index("up")
    flags = " ".join(command[at:])
    assert command[0] == sys.executable
    assert "--prefill 1 --decode 2" in flags
    assert flags.endswith("--model demo --no-prefix-caching --dtype float32")
    assert made.url.endswith(command[command.index("--port") + 1])


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.name)
async def test_every_engine_gets_program_model_port_threads_and_cores(kind, tuned: bool, tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model", 1)
    args = parse([kind.flag, "/opt/program", "--model", str(directory), "--gguf", "weights.gguf"])
    made = await contestant_of(EngineChoice(kind, tuned), args)
    assert made.launch is not None
    command = made.launch.command
    assert command[0] == "/opt/program"
    assert ("weights.gguf" if kind.loads == "gguf" else str(directory)) in command
    assert made.url.rpartition(":")[2] in command
    assert not [part for part in (*command, *filter(None, made.launch.env.values())) if "{" in part]
    assert (kind.tuned[0] in command[len(kind.command) :]) == tuned
    assert (made.dialect.as_text is not None) == kind.text_only


async def test_an_engine_that_was_not_given_says_by_which_flag() -> None:
    made = await contestant_of(engine("llama.cpp"), parse([]))
    assert "--llama-server" in made.missing


async def test_a_text_engine_gets_the_text_of_the_tokens(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model", 1)
    args = parse(["--transformers", "/opt/program", "--model", str(directory)])
    made = await contestant_of(engine("transformers"), args)
    assert made.dialect.as_text is not None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert made.dialect.as_text(tokenizer.encode("some text").ids) == "some text"


async def test_float32_weights_are_made_once_by_the_quantizer_beside_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.gguf"
    source.write_bytes(b"GGUF weights")
    quantizer = tmp_path / "llama-quantize"
    log = tmp_path / "log"
    quantizer.write_text(
        f"#!{sys.executable}\nimport json, shutil, sys\n"
        f"open({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\nshutil.copy(sys.argv[2], sys.argv[3])\n"
    )
    quantizer.chmod(0o755)
    first = await float32_gguf(str(source), str(tmp_path / "llama-server"))
    second = await float32_gguf(str(source), str(tmp_path / "llama-server"))
    assert first == second
    assert first.read_bytes() == source.read_bytes()
    (called,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (called[0], called[1], called[3]) == ("--allow-requantize", str(source), "F32")
    assert list(first.parent.iterdir()) == [first]


async def test_a_quantizer_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.gguf"
    source.write_bytes(b"GGUF weights")
    quantizer = tmp_path / "llama-quantize"
    quantizer.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[3], 'w')\nsys.exit('bad magic')\n")
    quantizer.chmod(0o755)
    with pytest.raises(BenchError, match=r"code 1: bad magic"):
        await float32_gguf(str(source), str(tmp_path / "llama-server"))
    assert list((tmp_path / "cache" / "bench").iterdir()) == []
    with pytest.raises(BenchError, match="cannot make"):
        await float32_gguf(str(source), str(tmp_path / "elsewhere" / "llama-server"))
