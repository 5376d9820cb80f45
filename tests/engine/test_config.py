"""What all processes share: here, how they log."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.engine.config import LogEvent, setup_logging

FIELDS = {"id": "a-1", "status": 200, "e2e_s": 0.25, "name": 'two words\n"', "empty": "", "texts": ["a", "b c"]}


@pytest.fixture(autouse=True)
def _root_logger_kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_an_event_is_one_line_of_names_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", as_json=False)
    logging.getLogger("x").info(LogEvent("request", FIELDS))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        'INFO x: request id=a-1 status=200 e2e_s=0.25 name="two words\\n\\"" empty="" texts=["a", "b c"]'
    )


def test_an_event_s_fields_are_members_of_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", as_json=True)
    logging.getLogger("x").info(LogEvent("request", FIELDS))
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert {name: entry[name] for name in FIELDS} == FIELDS
    assert (entry["message"], entry["level"], entry["logger"]) == ("request", "info", "x")


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_a_process_that_a_library_aborts_says_where_it_was() -> None:
    program = "import os; from pdserve.engine.config import run_main; run_main('pdserve.test', lambda: os.abort())"
    done = run(program)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "run_main" in done.stderr


def test_a_process_may_have_as_many_open_files_as_its_user() -> None:
    program = (
        "import resource as r; from pdserve.engine.config import run_main;"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, min(hard, 1000)));"
        "run_main('pdserve.test', lambda: print(r.getrlimit(r.RLIMIT_NOFILE)))"
    )
    done = run(program)
    assert done.returncode == 0
    assert done.stdout == "(1000, 1000)\n"


def test_a_process_leaves_with_its_code_and_all_it_has_said_and_takes_nothing_apart() -> None:
    program = (
        "import atexit, logging; from pdserve.engine.config import leave, setup_logging;"
        "setup_logging('info', True); atexit.register(print, 'taken apart');"
        "print('said'); logging.getLogger('x').info('logged'); leave(3)"
    )
    done = run(program)
    assert done.returncode == 3
    assert done.stdout == "said\n"
    assert "logged" in done.stderr
