"""`python -m pdserve.bench COMMAND …`: exit code 2 and one line on stderr for what cannot be run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from .errors import BenchError
from .gateway import main as gateway
from .machine import package_version
from .overload import main as overload
from .serve import main as serve
from .steady import main as steady


def _later(module: str) -> Callable[[list[str]], int]:
    """The command of a module that brings more than a client of a server needs (torch, the model hub)."""

    def run(arguments: list[str]) -> int:
        main: Callable[[list[str]], int] = import_module(f".{module}", __package__).main
        return main(arguments)

    return run


USAGE = """usage: pdserve bench COMMAND [OPTIONS]

commands:
  serve       load a running server and measure TTFT, TPOT, ITL, throughput and goodput
  overload    load it beyond what it can do: how much is still in time?
  goodput     the highest rate at which requests are in time: split against unsplit, with a verdict for your workload
  peers       this system and other engines on this machine, one after the other
  steady      many short requests: is the last one served as the first ones were?
  gateway     what the gateway costs a token, with workers that answer from memory
  kernels     how near the CPU kernels come to the machine's limits, without a server
  helped      what a helper thread on a second core is worth, without a server
  perplexity  what weights in fewer bits cost in quality, without a server
  transfer    how fast KV moves between two processes, against a plain copy, without a server

`pdserve bench COMMAND --help` lists the options of a command."""
EXIT_USAGE = 2
COMMANDS = {
    "serve": serve, "overload": overload, "steady": steady, "gateway": gateway,
    **{name: _later(name) for name in ("goodput", "peers", "kernels", "helped", "perplexity", "transfer")},
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the named command; its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        print(f"pdserve {package_version()}")
        return 0
    if arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"pdserve.bench: error: unknown command {arguments[0]!r}; there is: {known}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except BenchError as error:
        print(f"pdserve.bench: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
