"""The kernels in C (`native/`): compiled once by the machine's own compiler, kept in the cache, called through ctypes.

The name of what was compiled holds a hash of sources, flags and architecture, so another version, or a home directory
shared between different machines, never meets the wrong one. Where there is no compiler, or it fails, one line is
logged and everything runs on torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("native")
COMMON_FLAGS = (
    "-std=gnu11", "-O3", "-pthread", "-fPIC", "-fvisibility=hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wno-psabi",
)  # fmt: skip
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
# Instruction sets, the best first, by the name torch gives what this processor, and its operating system, can run.
LEVEL_FLAGS = {
    "AVX512_VNNI": (*_AVX512, "-mavx512vnni"),  # torch's name is AVX512, too
    "AVX512": _AVX512,
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}
COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 120.0
COMPILERS_AT_ONCE = 4
PARTIAL = ".partial-"
ABANDONED_AFTER_S = 10 * COMPILE_LIMIT_S
MAX_REASON_CHARS = 300

_Type = type[ctypes.c_void_p] | type[ctypes.c_int64] | type[ctypes.c_float]
_TYPES: dict[str, _Type] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
SIGNATURES = {  # a letter for every argument
    "pd_linear": "ppipi",
    "pd_attention_inputs": "ppppipppi",
    "pd_attention_outputs": "ppppppi",
    "pd_gated_mlp": "pppppi",
    "pd_quantized_linear": "ppipip",
    "pd_panel": "pp",
    "pd_largest": "piiipp",
    "pd_attend": "pppip",
    "pd_write_kv": "ppipipi",
    "pd_gather_slab": "ppp",
    "pd_scatter_slab": "ppp",
    "pd_begin_layer": "ppppppipppi",
    "pd_end_layer": "pppppppppi",
    "pd_run_layers": "ppippppippppppi",
    "pd_set_threads": "ippip",
    "pd_helped_ns": "p",
    "pd_give_way_at": "ii",
    "pd_aside_ns": "p",
    "pd_ask": "iiip",
    "pd_ask_no_more": "ii",
}


class NativeUnavailable(Exception):
    """Why there are no kernels in C here, in one line."""


@cache
def native() -> ctypes.CDLL | None:
    """The kernels for this processor, compiled now if they never were; None (and one line in the log) without them."""
    try:
        return open_library(level())
    except NativeUnavailable as error:
        log.warning("no kernels in C, torch does their work, slower: %s", error)
        return None


def level() -> str:
    """The best of LEVEL_FLAGS that runs here."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512") and torch.cpu._is_vnni_supported():
        return "AVX512_VNNI"
    return next((name for name in LEVEL_FLAGS if capability.startswith(name)), "DEFAULT")


def open_library(level: str) -> ctypes.CDLL:
    """The kernels for one instruction set. Raises NativeUnavailable."""
    path = _build(level)
    try:
        library = ctypes.CDLL(str(path))
        for name, letters in SIGNATURES.items():
            function = library[name]
            function.argtypes = [_TYPES[letter] for letter in letters]
            function.restype = None
            setattr(library, name, function)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
    return library


def cache_directory() -> Path:
    """native/ in $PDSERVE_CACHE, or in pdserve/ of $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("PDSERVE_CACHE"):
        return Path(own).expanduser() / "native"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "pdserve" / "native"


def _build(level: str) -> Path:
    """The compiled file. Of processes that start together one compiles, and the others wait for it."""
    flags = (*COMMON_FLAGS, *LEVEL_FLAGS[level])
    digest = hashlib.sha256(f"{platform.machine()} {flags}".encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(f"{source.name}\n".encode() + source.read_bytes())
    try:
        directory = cache_directory()
    except RuntimeError as error:
        raise NativeUnavailable(f"no home directory, and no PDSERVE_CACHE: {error}") from error
    path = directory / f"kernels-{level.lower()}-{digest.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _lock(directory):
                if not path.exists():
                    _clean(directory)
                    _make(path, flags)
        status = path.stat()
    except OSError as error:
        raise NativeUnavailable(f"{directory}: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise NativeUnavailable(f"{path} belongs to, or can be written by, somebody else")
    return path


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Only one process at a time; one that has waited for longer than a compiler may take goes on by itself."""
    held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)

    def take() -> None:
        with contextlib.suppress(OSError):  # a file system without such locks: then each compiles for itself
            fcntl.flock(held, fcntl.LOCK_EX)

    try:
        locking = threading.Thread(target=take, daemon=True)
        locking.start()
        locking.join(COMPILE_LIMIT_S)
        yield
    finally:
        os.close(held)


def _clean(directory: Path) -> None:
    """Remove what a process that was killed while it compiled has left there."""
    for partial in directory.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(partial)


def _make(path: Path, flags: tuple[str, ...]) -> None:
    """Compile the sources, each by itself and a few at a time. What appears at `path` is whole."""
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=path.parent) as partial:
        sources = sorted(SOURCES.glob("*.c"), key=lambda source: -source.stat().st_size)
        objects = [str(Path(partial) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(min(COMPILERS_AT_ONCE, os.cpu_count() or 1)) as pool:
            steps = zip(sources, objects, strict=True)
            list(pool.map(lambda step: _compile((*flags, "-c", "-o", step[1], str(step[0]))), steps))
        made = Path(partial) / path.name
        _compile((*flags, "-shared", "-o", str(made), *objects, "-lm"))
        made.rename(path)


def _compile(arguments: tuple[str, ...]) -> None:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable("there is no C compiler (cc)")
    try:
        done = subprocess.run(
            [compiler, *arguments], capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"{compiler} did not end within {COMPILE_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise NativeUnavailable(f"{compiler} failed: {' '.join(done.stderr.split())[:MAX_REASON_CHARS]}")
