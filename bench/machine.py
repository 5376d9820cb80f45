"""What the figures were measured on: without it they mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Machine:
    """The client's machine: the server's too when the URL is local."""

    cpu: str
    cores: int  # that this process may use
    memory_gib: float
    load_average: float  # over the last minute, when the run began: other work disturbs the figures
    system: str
    python: str
    pdserve: str
    commit: str  # "" when this is no git checkout; "+changes" when files differ from it


def describe_machine() -> Machine:
    """Read all of it from the system."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        load_average=round(os.getloadavg()[0], 2),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        pdserve=package_version(),
        commit=_commit(Path(__file__).resolve()),
    )


def package_version() -> str:
    """The installed version, or a word for a source tree that is not installed."""
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "source tree"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _commit(this_file: Path) -> str:
    root = _git(this_file.parent, "rev-parse", "--show-toplevel")
    if not root or Path(root, "bench", this_file.name).resolve() != this_file:
        return ""  # installed below somebody else's checkout, perhaps
    commit = _git(this_file.parent, "rev-parse", "--short=12", "HEAD")
    return commit + ("+changes" if commit and _git(Path(root), "status", "--porcelain") else "")


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command; "" when it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
