"""`pdserve keys DIR` and `pdserve keys api NAME`."""

from __future__ import annotations

import sys
from pathlib import Path

from ..engine.config import run_main
from ..transfer.errors import ConfigError
from ..transfer.keys import create_keys
from .api_keys import line_for, new_key


def make_cluster_keys(directory: Path) -> None:
    create_keys(directory)
    print(
        f"Keys for one cluster are in {directory}. Give every process `--keys {directory}`; for other machines copy it "
        f"as it is, over a channel you trust (scp -rp). Whoever has {directory}/cluster.key belongs to the cluster."
    )


def make_api_key(name: str) -> None:
    """The key goes to stdout and is kept nowhere; the line for the file goes to stderr."""
    key = new_key()
    line = line_for(name, key)
    print(f"The key of {name}, shown only now; add the line below it to the file of --api-keys:", file=sys.stderr)
    print(key, flush=True)
    print(line, file=sys.stderr)


def main(what: str, name: str | None) -> int:
    """Entry point of `pdserve keys`; returns the exit code."""

    def run() -> None:
        if what == "api":
            if name is None:
                raise ConfigError("whose key? `pdserve keys api NAME` (a directory of that name: ./api)")
            make_api_key(name)
        elif name is not None:
            raise ConfigError(f"{name!r} is one argument too many: `pdserve keys DIR` or `pdserve keys api NAME`")
        else:
            make_cluster_keys(Path(what))

    return run_main("pdserve keys", run)
