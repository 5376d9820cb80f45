"""The `pdserve` command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pdserve.engine.config import package_version
from pdserve.gateway import cli

COMMANDS = ("up", "gateway", "prefill", "decode", "keys", "drain", "bench")


class Became(BaseException):
    """Stands in for the exec: the process would be another program from here on."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    def record(path: str, argv: list[str]) -> None:
        assert path == sys.executable
        calls.append(argv[1:])
        raise Became

    monkeypatch.setattr(os, "execv", record)
    return calls


def invoke(*argv: str) -> None:
    with pytest.raises(Became):
        CliRunner().invoke(cli.app, list(argv), catch_exceptions=False)


def test_alone_it_lists_the_commands_and_succeeds() -> None:
    result = CliRunner().invoke(cli.app, [])
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("room", ["gateway", "prefill", "decode", "bench"])
def test_a_command_becomes_its_program_with_every_flag_passed_on(executed: list[list[str]], room: str) -> None:
    flags = ["serve", "--model", "demo", "--help", "--version", "-x", "--unknown=1"]
    invoke(room, *flags)
    assert executed == [["-P", "-m", f"pdserve.{room}", *flags]]


@pytest.mark.parametrize("room", ["gateway", "prefill", "decode"])
def test_log_flags_before_the_command_reach_its_program(executed: list[list[str]], room: str) -> None:
    invoke("--log-level", "debug", "--log-json", room, "--model", "demo")
    assert executed == [["-P", "-m", f"pdserve.{room}", "--log-level", "debug", "--log-json", "--model", "demo"]]


def test_an_unknown_log_level_is_refused_before_anything_runs(executed: list[list[str]]) -> None:
    result = CliRunner().invoke(cli.app, ["--log-level", "loud", "gateway"])
    assert result.exit_code == 2
    assert executed == []


def test_up_gets_its_flags_and_its_exit_code_is_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(cli.app, ["up", "--model", "demo", "--decode", "0"])
    assert result.exit_code == 2
    assert "at least one decode worker" in result.output + capfd.readouterr().err


@pytest.mark.parametrize("flags", [["--version"], ["up", "--version"]])
def test_the_version_is_shown_everywhere(flags: list[str]) -> None:
    result = CliRunner().invoke(cli.app, flags)
    assert result.exit_code == 0
    assert result.output.strip() == f"pdserve {package_version()}"


def test_the_version_comes_without_the_heavy_libraries() -> None:
    code = (
        "import sys; from pdserve.gateway import cli\n"
        "try: cli.app(['--version'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'zmq', 'pydantic', 'starlette') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"pdserve {package_version()}", "[]"]
