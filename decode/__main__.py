"""`python -m pdserve.decode`: one decode worker."""

from __future__ import annotations

import socket
import sys

from ..engine.budget import WorstStep
from ..engine.config import exit_with_parent, handle_termination, leave, pin_to_cpu, run_main, setup_logging
from ..engine.cores import take_cores
from ..engine.setup import build_engine
from .config import parse_arguments
from .worker import DecodeWorker


def main() -> None:
    config, args = parse_arguments(sys.argv[1:])
    exit_with_parent(args.exit_with_parent)
    setup_logging(args.log_level, args.log_json)
    cores = take_cores(config.worker, pin_to_cpu(config.worker.cpu))
    worst = WorstStep(config.worker.chunk_tokens, config.max_sequences)
    engine = build_engine(config.worker.engine, worst, config.cuda_graphs)
    worker = DecodeWorker(config, engine, socket.gethostname(), cores)
    handle_termination(worker.drain, worker.stop)
    worker.run()


if __name__ == "__main__":
    leave(run_main("pdserve.decode", main))
