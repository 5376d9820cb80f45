"""`pdserve up`: flags, placement, readiness; the supervision itself is in test_supervisor.py."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.gateway.launch import UpConfig, child_specs, parse_config, place_workers
from pdserve.gateway.model_flags import ModelSource
from pdserve.gateway.up import (
    claim_port,
    claim_ports,
    local_url_host,
    main,
    missing_workers,
    ready_message,
    socket_directory,
)
from pdserve.transfer.errors import ConfigError

SOCKETS = Path("/run/pdserve-test")
DEMO = (ModelSource("demo", "demo"),)


def commands(*flags: str, cpus: tuple[int, ...] = (0, 1)) -> dict[str, list[str]]:
    config = parse_config(["--model", "demo", *flags])
    specs = child_specs(config, [Path("/models/demo")], 8123, SOCKETS, cpus)
    return {spec.name: list(spec.command) for spec in specs}


def value(command: list[str], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


@pytest.fixture
def private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_default_is_one_worker_of_each_kind_behind_one_gateway() -> None:
    assert list(commands()) == ["gateway", "prefill-0", "decode-0"]


@pytest.mark.parametrize("flags", [("--aggregated",), ("--prefill", "0"), ("--prefill", "3", "--aggregated")])
def test_aggregated_means_no_prefill_workers(flags: tuple[str, ...]) -> None:
    assert list(commands(*flags, "--decode", "2")) == ["gateway", "decode-0", "decode-1"]


def test_every_command_line_names_its_program_and_dies_with_its_parent() -> None:
    for name, command in commands("--prefill", "2", "--decode", "2").items():
        assert f"pdserve.{name.partition('-')[0]}" in command
        assert "--exit-with-parent" in command
        assert value(command, "--model") == "/models/demo"  # resolved once, not by every process


def test_flags_left_out_are_left_to_the_defaults_of_each_program() -> None:
    optional = {"--block-size", "--kv-blocks", "--max-queue", "--link", "--dtype", "--no-prefix-caching", "--log-json"}
    for command in commands().values():
        assert optional.isdisjoint(command)


def test_workers_find_the_gateway_where_it_listens() -> None:
    found = commands()
    control = value(found["gateway"], "--listen")
    assert control is not None
    assert value(found["prefill-0"], "--gateway") == value(found["decode-0"], "--gateway") == control


def test_several_gateways_listen_on_consecutive_ports_and_every_worker_serves_all_of_them() -> None:
    found = commands("--gateways", "3")
    gateways = [found[f"gateway-{i}"] for i in range(3)]
    assert [value(command, "--port") for command in gateways] == ["8123", "8124", "8125"]
    controls = [value(command, "--listen") for command in gateways]
    assert len(set(controls)) == 3
    for name in ("prefill-0", "decode-0"):
        flags = found[name]
        assert [flags[i + 1] for i, flag in enumerate(flags) if flag == "--gateway"] == controls


def test_several_models_have_workers_of_their_own_behind_one_gateway() -> None:
    flags = ["--model", "a=/x", "--model", "org/b=/y", "--decode", "2", "--decode", "a=1", "--prefill", "org/b=0"]
    config = parse_config([*flags, "--max-model-len", "a=64", "--alias", "chat=a:9,org/b:1"])
    specs = child_specs(config, [Path("/x"), Path("/y")], 8123, SOCKETS, (0, 1, 2, 3))
    found = {spec.name: list(spec.command) for spec in specs}
    assert list(found) == ["gateway", "prefill-a-0", "decode-a-0", "decode-org-b-0", "decode-org-b-1"]
    gateway = found["gateway"]
    assert [gateway[i + 1] for i, flag in enumerate(gateway) if flag == "--model"] == ["a=/x", "org/b=/y"]
    assert (value(gateway, "--alias"), value(gateway, "--max-model-len")) == ("chat=a:9,org/b:1", "a=64")
    for name, model, path, longest in (("prefill-a-0", "a", "/x", "64"), ("decode-org-b-1", "org/b", "/y", None)):
        command = found[name]
        given = [value(command, flag) for flag in ("--name", "--served-model-name", "--model", "--max-model-len")]
        assert given == [name, model, path, longest]
    assert len({value(command, "--cpu") for command in found.values()} - {None}) == 4, "each has a core of its own"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "a/b=m", "--model", "a b=m"], "too much alike"),
        (["--model", "a=m", "--model", "b=m", "--decode", "b=0"], "at least one decode worker"),
        (["--model", "a=m", "--model", "b=m", "--decode", "c=1"], "models: a, b"),
        (["--model", "a=m", "--alias", "x=c"], "no model 'c'"),
    ],
)
def test_models_that_cannot_be_started_are_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(flags)


def test_a_gateway_is_stopped_before_the_workers_it_needs_to_finish() -> None:
    config = parse_config(["--model", "demo", "--gateways", "2"])
    specs = child_specs(config, [Path("/m")], 1, SOCKETS, [0, 1])
    assert [spec.name for spec in specs if spec.stops_first] == ["gateway-0", "gateway-1"]


@pytest.mark.parametrize(
    ("flag", "gateway", "prefill", "decode"),
    [
        ("--max-model-len=512", "512", "512", "512"),
        ("--served-model-name=tiny", "tiny", "tiny", "tiny"),
        ("--log-level=debug", "debug", "debug", "debug"),
        ("--death-bound-s=7.0", "7.0", "7.0", "7.0"),
        ("--requests-per-minute=60", "60", None, None),
        ("--tokens-per-minute=9000", "9000", None, None),
        ("--max-concurrent=4", "4", None, None),
        ("--request-timeout-s=7.0", "7.0", None, None),
        ("--cors-origin=https://a.example", "https://a.example", None, None),
        ("--max-queue=7", "7", None, None),
        ("--queue-timeout-s=2.5", "2.5", None, None),
        ("--local-prefill=never", "never", None, None),
        ("--chat-template=t.jinja", "t.jinja", None, None),
        ("--tool-call-parser=mistral", "mistral", None, None),
        ("--reasoning-parser=think", "think", None, None),
        ("--keep-alive-s=7.0", "7.0", None, None),
        ("--port=8123", "8123", None, None),
        ("--host=0.0.0.0", "0.0.0.0", None, None),
        ("--link=zmq", None, "zmq", "zmq"),
        ("--dtype=bfloat16", None, "bfloat16", "bfloat16"),
        ("--quantization=int4", None, "int4", "int4"),
        ("--device=cuda:1", None, "cuda:1", "cuda:1"),
        ("--gpu-memory-utilization=0.45", None, "0.45", "0.45"),
        ("--cuda-graphs=never", None, None, "never"),
        ("--kv-cache-dtype=int8", None, "int8", "int8"),
        ("--chunk-tokens=64", None, "64", "64"),
        ("--drain-timeout-s=7.0", None, "7.0", "7.0"),
        ("--shutdown-s=7.0", "7.0", None, None),
        ("--max-sequences=8", None, None, "8"),
        ("--itl-slo-ms=80.0", None, None, "80.0"),
    ],
)
def test_a_flag_reaches_the_programs_it_concerns(
    flag: str, gateway: str | None, prefill: str | None, decode: str | None
) -> None:
    found = commands(flag)
    name = flag.partition("=")[0]
    assert [value(found[child], name) for child in ("gateway", "prefill-0", "decode-0")] == [gateway, prefill, decode]


@pytest.mark.parametrize("flag", ["--no-prefix-caching", "--no-fused-modules", "--torch-compile", "--check-invariants"])
def test_a_switch_for_workers_reaches_both_pools_and_not_the_gateway(flag: str) -> None:
    found = commands(flag)
    assert [flag in found[child] for child in ("gateway", "prefill-0", "decode-0")] == [False, True, True]


def test_each_pool_may_have_a_device_of_its_own() -> None:
    found = commands("--device=cuda:0", "--decode-device=cuda:1")
    assert [value(found[child], "--device") for child in ("prefill-0", "decode-0")] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--log-json"])
def test_a_switch_for_all_reaches_all(flag: str) -> None:
    assert all(flag in command for command in commands(flag).values())


def test_every_origin_reaches_the_gateway_and_prompts_are_logged_there_only_when_asked_for() -> None:
    gateway = commands("--cors-origin=https://a", "--cors-origin=http://b:1", "--log-prompts")["gateway"]
    assert [gateway[i + 1] for i, word in enumerate(gateway) if word == "--cors-origin"] == ["https://a", "http://b:1"]
    assert "--log-prompts" in gateway
    assert not {"--cors-origin", "--log-prompts"} & set(commands()["gateway"])


def test_block_sizes_and_pool_sizes_are_set_per_side() -> None:
    found = commands("--block-size=16", "--decode-block-size=32", "--kv-blocks=50", "--prefill-kv-blocks=70")
    assert value(found["prefill-0"], "--block-size") == "16"
    assert value(found["decode-0"], "--block-size") == "32"
    assert value(found["prefill-0"], "--kv-blocks") == "70"
    assert value(found["decode-0"], "--kv-blocks") == "50"


def test_workers_compute_on_one_thread_and_the_gateway_is_left_alone() -> None:
    config = parse_config(["--model", "demo"])
    specs = {spec.name: spec for spec in child_specs(config, [Path("/m")], 1, SOCKETS, [0, 1])}
    for name in ("prefill-0", "decode-0"):
        assert specs[name].env["OMP_NUM_THREADS"] == specs[name].env["MKL_NUM_THREADS"] == "1"
        assert "--cpu" in specs[name].command
    assert "OMP_NUM_THREADS" not in specs["gateway"].env
    assert "--cpu" not in specs["gateway"].command


@pytest.mark.parametrize("num_cpus", range(1, 12))
@pytest.mark.parametrize("prefill", range(4))
@pytest.mark.parametrize("decode", range(1, 5))
def test_workers_share_cores_only_when_they_must_and_the_pools_never_with_two_cores(
    prefill: int, decode: int, num_cpus: int
) -> None:
    cpus = [10 + i for i in range(num_cpus)]
    for_prefill, for_decode = place_workers(prefill, decode, cpus)
    assert (len(for_prefill), len(for_decode)) == (prefill, decode)
    assert {*for_prefill, *for_decode} <= set(cpus)
    if num_cpus >= prefill + decode:
        assert len({*for_prefill, *for_decode}) == prefill + decode
    if num_cpus >= 2:
        assert set(for_prefill).isdisjoint(for_decode)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--decode", "0"], "at least one decode worker"),
        (["--prefill", "-1"], "--prefill -1"),
        (["--port", "70000"], "--port 70000"),
        (["--port", "65535", "--gateways", "2"], "--port 65535"),
        (["--gateways", "0"], "--gateways 0"),
        (["--requests-per-minute", "0"], "--requests-per-minute 0"),
        (["--tokens-per-minute", "-5"], "--tokens-per-minute -5"),
        (["--max-concurrent", "0"], "--max-concurrent 0"),
        (["--request-timeout-s", "nan"], "--request-timeout-s nan"),
        (["--itl-slo-ms", "0"], "--itl-slo-ms 0"),
        (["--cors-origin", "example.org"], "--cors-origin example.org"),
        (["--cors-origin", "https://example.org/"], "--cors-origin https://example.org/"),
    ],
)
def test_numbers_that_cannot_work_are_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(["--model", "demo", *flags])


def test_port_zero_takes_a_free_port_and_a_free_port_is_kept() -> None:
    port = claim_port("127.0.0.1", 0)
    assert port > 0
    assert claim_port("127.0.0.1", port) == port


def test_consecutive_ports_are_all_free_or_the_one_that_is_not_is_named() -> None:
    first = claim_ports("127.0.0.1", 0, 3)
    assert claim_ports("127.0.0.1", first, 3) == first
    with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(ConfigError, match=f"port {first + 1}"):
        claim_ports("127.0.0.1", first, 3)


@pytest.fixture
def root_logger_kept() -> Iterator[None]:
    """`main` sets up logging for its process, which here is that of the tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger_kept")
def test_a_port_in_use_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["--model", "/nonexistent/model", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve up: error: cannot listen on 127.0.0.1")
    assert str(port) in line


@pytest.mark.usefixtures("root_logger_kept")
def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nonexistent/model", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve up: error: ")
    assert "/nonexistent/model" in line


def test_the_socket_directory_is_private_and_gone_afterwards(private_runtime: Path) -> None:
    with socket_directory() as first, socket_directory() as second:
        assert first != second
        assert first.stat().st_mode & 0o077 == 0
        (first / "gateway").touch()
    assert list((private_runtime / "pdserve").iterdir()) == []


def worker(name: str, *links: tuple[str, str], state: str = "ready") -> dict[str, object]:
    """A worker as /pools shows it, as far as readiness goes."""
    return {"name": name, "state": state, "links": [{"worker": f"{peer}#0a1b2c3d", "state": s} for peer, s in links]}


PREFILL_0 = worker("prefill-0", ("decode-0", "linked"))


@pytest.mark.parametrize(
    ("workers", "decode", "missing"),
    [
        ([PREFILL_0, worker("decode-0")], 1, []),
        ([PREFILL_0, worker("decode-0")], 2, ["decode-1"]),
        (
            [worker("prefill-0", ("decode-0", "linked")), worker("decode-0"), worker("decode-1")],
            2,
            ["prefill-0 → decode-1"],
        ),
        ([worker("prefill-0", ("decode-0", "connecting")), worker("decode-0")], 1, ["prefill-0 → decode-0"]),
        ([PREFILL_0, worker("decode-0", state="starting")], 1, ["decode-0"]),
        ([], 1, ["prefill-0", "decode-0"]),
    ],
)
def test_the_system_is_ready_when_every_worker_is_and_every_pair_is_linked(
    workers: list[dict[str, object]], decode: int, missing: list[str]
) -> None:
    assert missing_workers({"workers": workers}, UpConfig(DEMO, decode={"demo": decode})) == missing


def test_the_system_waits_for_the_links_of_each_model_and_for_none_between_models() -> None:
    config = UpConfig((ModelSource("a", "/x"), ModelSource("b", "/y")), prefill={"b": 0})
    workers = [worker("prefill-a-0", ("decode-a-0", "linked")), worker("decode-a-0")]
    assert missing_workers({"workers": workers}, config) == ["decode-b-0"]
    assert missing_workers({"workers": [*workers, worker("decode-b-0")]}, config) == []
    workers[0] = worker("prefill-a-0")
    assert missing_workers({"workers": [*workers, worker("decode-b-0")]}, config) == ["prefill-a-0 → decode-a-0"]


def test_an_aggregated_system_waits_for_no_links() -> None:
    assert missing_workers({"workers": [worker("decode-0")]}, UpConfig(DEMO, prefill={"demo": 0})) == []


def test_no_answer_yet_means_that_everyone_is_missing() -> None:
    assert missing_workers(None, UpConfig(DEMO)) == ["prefill-0", "decode-0"]


@pytest.mark.parametrize(
    ("host", "named"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost"), ("10.0.0.7", "10.0.0.7")],
)
def test_the_address_to_try_is_one_that_can_be_reached(host: str, named: str) -> None:
    assert local_url_host(host) == named


def test_the_command_to_try_is_valid_shell_and_json(tmp_path: Path) -> None:
    config = UpConfig((ModelSource("a name", "demo"),))
    _, command = ready_message(config, "127.0.0.1", 8123).split("\n", 1)
    curl = tmp_path / "curl"
    curl.write_text(f"#!{sys.executable}\nimport json, sys\nprint(sys.argv[2], json.loads(sys.argv[-1])['model'])\n")
    curl.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "http://127.0.0.1:8123/v1/chat/completions a name\n"


STUB = """
import asyncio, sys
from pathlib import Path
from pdserve.gateway import up
from pdserve.gateway.supervisor import ChildSpec

def stubs(config, models, port, sockets, cpus):
    (sockets / "gateway").touch()
    code = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"
    return [ChildSpec(name, (sys.executable, "-S", "-c", code)) for name in ("gateway", "decode-0")]

up.child_specs = stubs
up.resolve = lambda model: Path(model)
sys.exit(up.main(["--model", "m", "--served-model-name", "m", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_the_exit_code_is_0(private_runtime: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUB], stderr=subprocess.PIPE, text=True, env=dict(os.environ), start_new_session=True
    )
    assert process.stderr is not None
    pids: list[int] = []
    try:
        for line in process.stderr:
            if " pid " in line:
                pids.append(int(line.split()[-1]))
            if len(pids) == 2:
                break
        process.send_signal(number)
        _, rest = process.communicate(timeout=30)
        assert process.returncode == 0, rest
    finally:
        process.kill()
        process.wait()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list((private_runtime / "pdserve").iterdir()) == []
