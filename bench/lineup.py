"""The servers a bench goes through: the flags that name them, and how to get at each."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from .checkpoint import float32_gguf, model_directory, tokenizer_of
from .client import Client, find_model, open_session
from .contestants import (
    ENGINES,
    Choice,
    Contestant,
    Running,
    Shape,
    engine,
    launch_engine,
    launch_shape,
    not_here,
    server,
    shape,
)
from .errors import BenchError
from .options import count, id_range
from .prompts import DEFAULT_FIRST_ID, DEFAULT_LAST_ID
from .servers import running

REQUEST_TIMEOUT_S = 300.0


def add_lineup_options(parser: argparse.ArgumentParser) -> None:
    """Who is measured, and with what: the same for all benches that start servers."""
    group = parser.add_argument_group("who is measured (each may be repeated; in this order)")
    group.add_argument(
        "--shape", dest="chosen", action="append", type=shape, metavar="NAME=XpYd",
        help="`pdserve up` with X prefill and Y decode workers",
    )  # fmt: skip
    group.add_argument("--server", dest="chosen", action="append", type=server, metavar="NAME=URL", help="runs already")
    known = ", ".join(kind.name for kind in ENGINES)
    group.add_argument(
        "--engine", dest="chosen", action="append", type=engine, metavar="NAME[-tuned]",
        help=f"one of {known}, as it comes or tuned for even latencies",
    )  # fmt: skip
    for kind in ENGINES:
        group.add_argument(kind.flag, metavar=kind.metavar, help=f"{kind.name}'s program")
    group.add_argument("--gguf", metavar="FILE", help="what llama.cpp loads (default: --model in float32, made once)")
    group.add_argument("--model", default="demo", help="directory, .gguf file, or `demo` (%(default)s)")
    group.add_argument("--up-flags", default="", metavar="'FLAGS'", help="more flags for `pdserve up`")
    group.add_argument("--cores", type=_cores, metavar="A,B,…", help="that servers may use (default: all of ours)")
    parser.add_argument(
        "--token-ids", type=id_range, default=(DEFAULT_FIRST_ID, DEFAULT_LAST_ID), metavar="FIRST:LAST",
        help=f"ids to draw prompts from ({DEFAULT_FIRST_ID}:{DEFAULT_LAST_ID})",
    )  # fmt: skip
    parser.add_argument("--seed", type=count, metavar="N", help="of prompts and arrivals (default: a new one each run)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG files there (needs matplotlib)")


def _cores(text: str) -> list[int]:
    cores = sorted({count(part) for part in text.split(",")})
    if not set(cores) <= os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"{text!r} names cores that this process may not use")
    return cores


def cores_of(args: argparse.Namespace) -> list[int]:
    return args.cores or sorted(os.sched_getaffinity(0))


async def contestant_of(choice: Choice, args: argparse.Namespace) -> Contestant:
    """How to measure what was chosen. Raises BenchError when its model cannot be had."""
    if isinstance(choice, Running):
        return Contestant(choice.name, choice.url)
    if isinstance(choice, Shape):
        return launch_shape(choice, ["--model", args.model, *shlex.split(args.up_flags)])
    program = vars(args)[choice.engine.flag.removeprefix("--").replace("-", "_")]
    if program is None:
        return not_here(choice)
    directory = await asyncio.to_thread(model_directory, args.model)
    model = str(directory)
    if choice.engine.loads == "gguf":
        model = args.gguf or str(await float32_gguf(args.model, program))
    made = launch_engine(choice, program, model, cores_of(args))
    if made.text_only:
        tokenizer = tokenizer_of(directory)
        made = replace(made, dialect=replace(made.dialect, as_text=tokenizer.decode))
    return made


async def connect(stack: AsyncExitStack, contestant: Contestant, cores: Sequence[int]) -> tuple[Client, int | None]:
    """Start it, unless it runs, and a client for it, until the stack is left; and the context of its model.

    Raises BenchError.
    """
    if contestant.missing:
        raise BenchError(contestant.missing)
    if contestant.launch is not None:
        await stack.enter_async_context(running(contestant.launch, cores))
    session = await stack.enter_async_context(open_session(REQUEST_TIMEOUT_S))
    if contestant.model is not None:
        return Client(session, contestant.url, contestant.model, contestant.dialect), None
    model = await find_model(session, contestant.url, None)
    return Client(session, contestant.url, model.name, contestant.dialect), model.max_model_len


def check_names(choices: Sequence[Choice]) -> None:
    """Raises BenchError when two have the same name."""
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BenchError(f"two of those to be measured are named {twice!r}")


def stop_on_sigterm() -> None:
    """Have SIGTERM do what Ctrl-C does: cancel the running task, which ends the server it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
