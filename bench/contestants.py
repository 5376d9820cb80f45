"""Who can be measured: servers that run already, shapes of our own, and other engines that are installed here.

An engine is described by data: how the user says where it is, its command line, what it loads, and how it answers. Two
configurations of each are known: as it comes, and *tuned* for even inter-token latencies (prompts in chunks of 128).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .client import PLAIN, Dialect
from .options import http_url
from .servers import Launch, free_port

PDSERVE = "from pdserve.gateway.cli import main; main()"
"""What the installed `pdserve` script does; it need not be installed."""
SHAPE = re.compile(r"(\d{1,3})p(\d{1,3})d")
TUNED = "-tuned"
ENGINE_MODEL = "m"  # the name under which engines are told to serve
MAX_SEQUENCES = 16  # that an engine runs at once; no scenario has more at a time
CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Contestant:
    """One server to measure. Without a `launch` somebody else runs it at `url`. `missing` says why it cannot be."""

    name: str
    url: str
    launch: Launch | None = None
    model: str | None = None  # to ask for; None: the first that it serves
    dialect: Dialect = PLAIN
    text_only: bool = False  # takes prompts as text, which somebody has to add to the dialect
    missing: str = ""


@dataclass(frozen=True)
class Engine:
    """`command` and `env` are filled in with {program}, {model}, {port}, {threads} and {cores}."""

    name: str
    flag: str  # by which the user says where its program is
    metavar: str
    loads: Literal["directory", "gguf"]
    command: tuple[str, ...]
    tuned: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    model: str | None = ENGINE_MODEL
    ignores_eos: bool = True
    text_only: bool = False


ENGINES = (
    Engine(
        name="llama.cpp",
        flag="--llama-server",
        metavar="PROGRAM",
        loads="gguf",
        command=(
            "{program}", "-m", "{model}", "--alias", ENGINE_MODEL, "-t", "{threads}", "-tb", "{threads}",
            "--parallel", str(MAX_SEQUENCES), "-c", str(MAX_SEQUENCES * CONTEXT_TOKENS), "--no-cache-prompt",
            "--no-webui", "--host", "127.0.0.1", "--port", "{port}",
        ),
        tuned=("-b", "128", "-ub", "128"),
    ),
    Engine(
        name="vllm",
        flag="--vllm",
        metavar="PYTHON",
        loads="directory",
        command=(
            "{program}", "-m", "vllm.entrypoints.cli.main", "serve", "{model}", "--served-model-name", ENGINE_MODEL,
            "--dtype", "float32", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES),
            "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", "{port}",
        ),
        tuned=("--enforce-eager", "--max-num-batched-tokens", "128"),
        env={
            "VLLM_CPU_OMP_THREADS_BIND": "{cores}", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": None,
        },
    ),
    Engine(
        name="transformers",
        flag="--transformers",
        metavar="PROGRAM",
        loads="directory",
        command=(
            "{program}", "serve", "{model}", "--device", "cpu", "--dtype", "float32", "--continuous-batching",
            "--cb-max-batch-tokens", "2048", "--host", "127.0.0.1", "--port", "{port}",
        ),
        tuned=("--cb-max-batch-tokens", "128"),
        env={"OMP_NUM_THREADS": "{threads}", "PYTHONPATH": None},
        model=None,
        ignores_eos=False,
        text_only=True,
    ),
)  # fmt: skip
BY_NAME = {engine.name: engine for engine in ENGINES}


@dataclass(frozen=True)
class Shape:
    """Our own system: so many prefill and decode workers."""

    name: str
    prefill: int
    decode: int


@dataclass(frozen=True)
class Running:
    """A server that somebody else runs."""

    name: str
    url: str


@dataclass(frozen=True)
class EngineChoice:
    """An engine in one of its configurations."""

    engine: Engine
    tuned: bool

    @property
    def name(self) -> str:
        return self.engine.name + TUNED * self.tuned


Choice = Shape | Running | EngineChoice


def shape(text: str) -> Shape:
    """`NAME=1p1d`, or `1p1d` for both."""
    name, _, counts = text.rpartition("=")
    match = SHAPE.fullmatch(counts)
    if match is None or int(match[2]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=XpYd with at least one decode worker, such as a=1p1d")
    return Shape(name or counts, int(match[1]), int(match[2]))


def server(text: str) -> Running:
    """`NAME=URL`."""
    name, separator, url = text.partition("=")
    if not (name and separator) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    return Running(name, http_url(url))


def engine(text: str) -> EngineChoice:
    """The name of an engine, `-tuned` behind it or not."""
    name = text.removesuffix(TUNED)
    if name not in BY_NAME:
        known = ", ".join(f"{name}[{TUNED}]" for name in BY_NAME)
        raise argparse.ArgumentTypeError(f"{text!r} is not an engine; there is {known}")
    return EngineChoice(BY_NAME[name], text.endswith(TUNED))


def launch_shape(chosen: Shape, up_flags: Sequence[str]) -> Contestant:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (
        sys.executable, "-P", "-c", PDSERVE, "up", "--prefill", str(chosen.prefill), "--decode", str(chosen.decode),
        "--port", str(port), *up_flags,
    )  # fmt: skip
    # It says so when every worker is linked to every other; /ready answers before that.
    return Contestant(chosen.name, url, Launch(command, url, "/ready", "pdserve is ready"))


def launch_engine(chosen: EngineChoice, program: str, model: str, cores: Sequence[int]) -> Contestant:
    """`model`: the directory or GGUF file that the engine loads."""
    kind = chosen.engine
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    values = {
        "program": program, "model": model, "port": str(port), "threads": str(len(cores)),
        "cores": ",".join(map(str, cores)),
    }  # fmt: skip
    command = kind.command + (kind.tuned if chosen.tuned else ())
    env = {name: None if value is None else value.format(**values) for name, value in kind.env.items()}
    launch = Launch(tuple(part.format(**values) for part in command), url, "/health", env=env)
    return Contestant(
        chosen.name, url, launch, kind.model, Dialect(ignore_eos=kind.ignores_eos), text_only=kind.text_only
    )


def not_here(chosen: EngineChoice) -> Contestant:
    """An engine that the user did not say the place of."""
    return Contestant(chosen.name, "", missing=f"not given ({chosen.engine.flag} {chosen.engine.metavar})")
