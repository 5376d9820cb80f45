"""Compiling the kernels in C: once, into the user's own cache, and never a reason not to start."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.kernels import library
from pdserve.kernels.library import NativeUnavailable, level, native, open_library
from tests.engine.test_fused import CHUNKS, run
from tests.engine.tiny_models import build, load

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache in which nothing is compiled yet, and a process that has not looked; compilers are quick."""
    monkeypatch.setattr(library, "COMMON_FLAGS", tuple(f.replace("-O3", "-O0") for f in library.COMMON_FLAGS))
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    native.cache_clear()
    yield tmp_path / "cache" / "native"
    native.cache_clear()


def compiled(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()]  # and nothing beside it


@needs_compiler
def test_it_is_compiled_once_and_then_found(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_library(level())
    (made,) = compiled(empty_cache)
    assert made.startswith(f"kernels-{level().lower()}-")
    monkeypatch.setenv("PATH", "")  # no compiler any more
    open_library(level())
    assert compiled(empty_cache) == [made]


@needs_compiler
def test_those_who_start_together_compile_once(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = tmp_path / "bin" / "cc"
    counting.parent.mkdir()
    counting.write_text(f'#!/bin/sh\necho once >> {tmp_path}/calls\nPATH={os.environ["PATH"]} exec cc "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("PATH", f"{counting.parent}:{os.environ['PATH']}")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(open_library, ["DEFAULT"] * 3))
    num_sources = len(list(library.SOURCES.glob("*.c")))
    assert len((tmp_path / "calls").read_text().split()) == num_sources + 1  # and they are linked
    assert len(compiled(empty_cache)) == 1


CHILD = """
import pathlib, sys
from pdserve.kernels import library
def make(path, flags):
    partial = pathlib.Path(library.tempfile.mkdtemp(prefix=library.PARTIAL, dir=path.parent))
    (partial / "half.o").touch()
    print("compiling", flush=True)
    sys.stdin.read()
library._make = make
library._build("DEFAULT")
"""


def written(path: Path, flags: tuple[str, ...]) -> None:
    path.touch(mode=0o600)


def test_the_lock_of_a_killed_process_is_free_and_what_it_left_is_removed_later(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "compiling\n"
        monkeypatch.setattr(library, "_make", written)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(library._build, "DEFAULT")
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            child.kill()
            made = waiting.result(timeout=30)
    finally:
        child.kill()
        child.communicate(timeout=10)
    (left,) = set(empty_cache.iterdir()) - {made}
    made.unlink()
    library._build("DEFAULT")
    assert left.exists(), "it might belong to somebody who waited for too long, and compiles"
    made.unlink()
    os.utime(left, (0, 0))
    library._build("DEFAULT")
    assert list(empty_cache.iterdir()) == [made]


def test_who_has_waited_for_longer_than_a_compiler_takes_goes_on(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 0.1)
    monkeypatch.setattr(library, "_make", written)
    empty_cache.mkdir(parents=True)
    held = os.open(empty_cache, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert library._build("DEFAULT").exists()
    finally:
        os.close(held)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_system_without_locks_is_no_reason_to_fail(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # NFS, of a directory

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(library, "_make", written)
    assert library._build("DEFAULT").exists()


def test_a_directory_that_cannot_be_written_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    empty_cache.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)  # root may write anywhere else
    with pytest.raises(NativeUnavailable, match=f"{empty_cache}: Read-only file system"):
        open_library("DEFAULT")


def test_a_user_without_a_home_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does where nobody has that number
    with pytest.raises(NativeUnavailable, match="no home directory"):
        open_library("DEFAULT")


@needs_compiler
def test_other_sources_or_flags_are_another_file(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "native"
    shutil.copytree(library.SOURCES, copy)
    monkeypatch.setattr(library, "SOURCES", copy)
    open_library("DEFAULT")
    with (copy / "vector.h").open("a") as file:
        file.write("/* changed */\n")
    open_library("DEFAULT")
    assert len(compiled(empty_cache)) == 2


def test_without_a_compiler_one_line_says_so_and_torch_does_the_work(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert run(load(build("llama")), CHUNKS).isfinite().all()
        assert native() is None
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.records[0].getMessage()


def compiler(directory: Path, script: bytes) -> str:
    """A $PATH with nothing in it but a `cc` that does this."""
    path = directory / "bin" / "cc"
    path.parent.mkdir()
    path.write_bytes(b"#!/bin/sh\n" + script + b"\n")
    path.chmod(0o755)
    return str(path.parent)


def test_a_compiler_that_fails_is_named_with_what_it_said(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", compiler(tmp_path, b"echo 'no space for\nobjects of \xff' >&2; exit 3"))
    with pytest.raises(NativeUnavailable, match="cc failed: no space for objects"):
        open_library("DEFAULT")
    assert compiled(empty_cache) == []


def test_a_compiler_that_does_not_end_is_ended(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo $$ >> {tmp_path}/started\nexec {shutil.which('sleep')} 100"
    monkeypatch.setenv("PATH", compiler(tmp_path, script.encode()))
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 2.0)
    with pytest.raises(NativeUnavailable, match="cc did not end within 2 s"):
        open_library("DEFAULT")
    started = (tmp_path / "started").read_text().split()
    assert len(started) <= 2 * library.COMPILERS_AT_ONCE, "the others are not tried any more"
    assert not any(Path("/proc", pid).exists() for pid in started)
    assert compiled(empty_cache) == []


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file"))
    assert native() is None


@needs_compiler
def test_a_file_that_others_could_have_written_is_not_loaded(empty_cache: Path) -> None:
    open_library("DEFAULT")
    (made,) = empty_cache.iterdir()
    os.chmod(made, 0o777)
    with pytest.raises(NativeUnavailable, match="somebody else"):
        open_library("DEFAULT")


def test_a_file_that_is_no_library_is_no_reason_to_fail(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = empty_cache / "kernels.so"
    empty_cache.mkdir(parents=True)
    broken.write_bytes(b"half a file")
    monkeypatch.setattr(library, "_build", lambda level: broken)
    assert native() is None
