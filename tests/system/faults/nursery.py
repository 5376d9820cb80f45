"""Forks the launch scripts of pdserve out of one process that has imported everything already.

A worker's start is mostly imports (seconds of CPU); forked from here it is a fraction of a second, so that hundreds of
kills fit into minutes. What runs in the child is the launch script's own `main`, from its command line on.

Run as a program: orders come in on stdin and reports go out on stdout, one JSON object a line.

    in   {"program": "decode", "argv": [...], "env": {...}, "log": "/path"}
    out  {"pid": 123}                   the answer to an order, in order
    out  {"exited": 123, "code": -9}    whenever a child has ended (negative: the signal)

When stdin ends, every child is killed; when this process dies, too. SIGUSR2 makes a child return free memory.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

PROGRAMS = ("gateway", "prefill", "decode")
PRELOAD = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
NAMES = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "LlamaForCausalLM")
PR_SET_PDEATHSIG = 1


def preload() -> None:
    for program in PROGRAMS:
        importlib.import_module(f"pdserve.{program}.__main__")
    for module in PRELOAD:
        importlib.import_module(module)
    transformers = importlib.import_module("transformers")
    for name in NAMES:  # its names are imported when they are first asked for
        assert hasattr(transformers, name)
    gc.collect()
    gc.freeze()  # the children's collections leave these pages shared


def trim(*_: object) -> None:
    """Give back what is free: what a process still holds then is what it really keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def become(order: dict[str, Any], parent: int) -> None:
    """In the child: run the launch script; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, trim)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.environ.update(order["env"])
        program = order["program"]
        sys.argv = [f"pdserve.{program}", *order["argv"]]
        run_main = importlib.import_module("pdserve.engine.config").run_main
        code = run_main(sys.argv[0], importlib.import_module(f"pdserve.{program}.__main__").main)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(report: dict[str, int]) -> None:
    os.write(1, json.dumps(report).encode() + b"\n")


def reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        say({"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def main() -> None:
    preload()
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness's to deal with
    signal.set_wakeup_fd(wake_write)
    children: set[int] = set()
    pending = b""
    me = os.getpid()
    say({"pid": me})
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            reap(children)
        if 0 not in readable:
            continue
        piece = os.read(0, 65_536)
        if not piece:
            break
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                become(order, me)
            children.add(pid)
            say({"pid": pid})
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
