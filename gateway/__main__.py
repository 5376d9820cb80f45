"""`python -m pdserve.gateway`: the HTTP front."""

from __future__ import annotations

import sys

from ..engine.config import exit_with_parent, run_main, setup_logging
from .config import parse_arguments
from .server import run


def main() -> None:
    config, args = parse_arguments(sys.argv[1:])
    exit_with_parent(args.exit_with_parent)
    setup_logging(args.log_level, args.log_json)
    run(config)


if __name__ == "__main__":
    sys.exit(run_main("pdserve.gateway", main))
