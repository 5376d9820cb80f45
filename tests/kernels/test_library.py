"""Compiling the kernels in C: once, into the user's own cache, and never a reason not to start."""

from __future__ import annotations

import logging
import os
import shutil
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
    """A cache in which nothing is compiled yet, and a process that has not looked."""
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
    monkeypatch.setattr(library, "COMMON_FLAGS", tuple(f.replace("-O3", "-O0") for f in library.COMMON_FLAGS))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(open_library, ["DEFAULT"] * 3))
    num_sources = len(list(library.SOURCES.glob("*.c")))
    assert len((tmp_path / "calls").read_text().split()) == num_sources + 1  # and they are linked
    assert len(compiled(empty_cache)) == 1


@needs_compiler
def test_other_sources_or_flags_are_another_file(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "native"
    shutil.copytree(library.SOURCES, copy)
    monkeypatch.setattr(library, "SOURCES", copy)
    monkeypatch.setattr(library, "COMMON_FLAGS", tuple(f.replace("-O3", "-O0") for f in library.COMMON_FLAGS))
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


def test_a_compiler_that_fails_is_named_with_what_it_said(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'no space for\nobjects' >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    with pytest.raises(NativeUnavailable, match="cc failed: no space for objects"):
        open_library("DEFAULT")
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
