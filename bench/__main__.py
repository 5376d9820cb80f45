"""`python -m pdserve.bench COMMAND …`: exit code 2 and one line on stderr for what cannot be run."""

from __future__ import annotations

import sys

from .errors import BenchError
from .gateway import main as gateway
from .machine import package_version
from .overload import main as overload
from .serve import main as serve
from .steady import main as steady


def kernels(arguments: list[str]) -> int:
    from .kernels import main  # brings torch, which a client of a server does without

    return main(arguments)


USAGE = """usage: pdserve bench COMMAND [OPTIONS]

commands:
  gateway   what the gateway costs a token, with workers that answer from memory
  kernels   how near the CPU kernels come to the machine's limits, without a server
  serve     load a running server and measure TTFT, TPOT, ITL, throughput and goodput
  overload  load it beyond what it can do: how much is still in time?
  steady    many short requests: is the last one served as the first ones were?

`pdserve bench COMMAND --help` lists the options of a command."""
EXIT_USAGE = 2
COMMANDS = {"gateway": gateway, "kernels": kernels, "serve": serve, "overload": overload, "steady": steady}


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
