"""What the three launch scripts share: common flags, logging, exit codes, pinning. Torch-free."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from ..transfer.errors import ConfigError, RegistrationRefused

EXIT_CONFIG = 2
EXIT_REFUSED = 3
STDERR_FILENO = 2
MAX_OPEN_FILES = 65_536
PR_SET_PDEATHSIG = 1
LOG_LEVELS = ("debug", "info", "warning", "error")


def package_version() -> str:
    """The installed version, or that of the source tree it runs from."""
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "0.1.0+source"


class LogEvent:
    """A log message made of fields: `log.info(LogEvent("request", {"status": 200}))`.

    As text it is one line of name=value; with --log-json every field is a member of the line's object.
    """

    def __init__(self, name: str, fields: Mapping[str, object]) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={_plain(value)}" for name, value in self.fields.items())])


PLAIN = re.compile(r"[A-Za-z0-9_.:,/@#-]+")


def _plain(value: object) -> str:
    """What could be taken for more than one value, or break the line, is quoted."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(value)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, LogEvent):
            entry |= {"message": record.msg.name, **record.msg.fields}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def setup_logging(level: str, as_json: bool) -> None:
    """Log to stderr, as text or one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags every process has."""
    parser.add_argument("--version", action="version", version=f"pdserve {package_version()}")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="encrypt tcp:// between the processes with these keys")
    parser.add_argument("--insecure", action="store_true", help="allow unencrypted addresses beyond this machine")
    parser.add_argument("--exit-with-parent", type=int, metavar="PID", help="end when this parent process dies (Linux)")


def exit_with_parent(parent: int | None) -> None:
    """Have Linux send SIGTERM to this process when `parent`, which started it, dies. None, or elsewhere: do nothing."""
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request was in place
            os.kill(os.getpid(), signal.SIGTERM)


def pin_to_cpu(cpu: int | None) -> set[int]:
    """Bind this process, threads started later included, to one core, and return those it might use.

    Raises ConfigError if it is not one of them.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cpu is None:
        return allowed
    if cpu not in allowed:
        raise ConfigError(f"--cpu {cpu} is not one of the cores this process may use: {sorted(allowed)}")
    os.sched_setaffinity(0, {cpu})
    return allowed


def raise_file_limit() -> None:
    """As many open files as this user may have: ZeroMQ ends the process when an accepted connection is one too many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def handle_termination(drain: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `drain` at the first SIGTERM or SIGINT and `stop` at every later one. Both must be safe in a handler."""
    asked = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal asked
        (stop if asked else drain)()
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def run_main(program: str, main: Callable[[], None]) -> int:
    """Run `main` and map what it raises to an exit code, with one line on stderr.

    0 clean (also after SIGINT), 2 ConfigError, 3 RegistrationRefused. Anything else is a bug and keeps its traceback;
    where a library ends the process (SIGABRT, SIGSEGV, ...), stderr says where every thread was.
    """
    faulthandler.enable(STDERR_FILENO)
    raise_file_limit()
    try:
        main()
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    except RegistrationRefused as error:
        print(f"{program}: refused: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 0
    return 0


def leave(code: int) -> NoReturn:
    """End this process as it is. Taking torch apart first costs more than a second of processor time, in which a worker
    that has nothing left to do would hold up whoever waits for its end, on a busy machine for many seconds."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
