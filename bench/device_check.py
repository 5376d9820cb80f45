"""`python bench/device_check.py`: everything that only a GPU can show, in one run of a few minutes on one of them.

    PYTHONPATH=build/import python bench/device_check.py          on a machine with a GPU
    PYTHONPATH=build/import python bench/device_check.py --dry    anywhere, to see that the check itself is whole

Nothing is downloaded: weights are random. Each section is a module of this folder with `run(setting)`, which yields
its checks as they are done (`device_run.py`). A section that fails, or lacks a package, does not keep the others from
running. In a dry run Triton's kernels are interpreted, a device's memory is host memory that two processes share, and
a section whose package is absent says so; on a device a package that is absent is wrong. The table is followed by one
line of JSON, with the status of every section, which is also written to bench/results/device_<date>.json. Exit code 1:
a section was wrong (a missed target is not). A dry run writes no file unless told where.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    # Python puts a script's folder first on the path; transformers would take our kernels.py for a package it knows.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    if "--dry" in sys.argv:  # Triton must know before it is imported, by whatever imports it
        os.environ["TRITON_INTERPRET"] = "1"
    sys.exit(import_module("pdserve.bench.device_run").main(sys.argv[1:]))
