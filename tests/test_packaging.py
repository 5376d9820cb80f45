"""The wheel: what `pip install` puts on a user's machine works away from the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("bench", "decode", "engine", "gateway", "kernels", "prefill", "transfer")


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves its own build/ beside what it packs."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", base / "dist", source, cwd=base)
    (found,) = (base / "dist").glob("pdserve-*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed into it."""
    target = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target)
    run(*pip, wheel, cwd=target)
    return target


def test_the_wheel_holds_every_source_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    suffixes = (".py", ".c", ".h", ".cu")
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in suffixes]
    assert packed == {f"pdserve/{path.relative_to(ROOT)}" for path in paths}


def test_the_installed_command_runs_and_knows_its_version(site: Path, tmp_path: Path) -> None:
    assert run(site / "bin" / "pdserve", "--version", cwd=tmp_path, path=site) == "pdserve 0.1.0\n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_installed_kernels_compile_into_the_users_cache(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    code = "from pdserve.kernels import library; print(library.__file__, library.native() is not None)"
    assert run(sys.executable, "-c", code, cwd=tmp_path, path=site) == f"{site}/pdserve/kernels/library.py True\n"
    assert [path.suffix for path in (tmp_path / "cache" / "native").iterdir()] == [".so"]


def test_what_is_imported_is_the_wheel_and_it_offers_no_kernels_package(site: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, pdserve.gateway.cli as cli\n"
        "print(cli.__file__, u.find_spec('kernels'), u.find_spec('pdserve.kernels') is not None)"
    )
    assert run(sys.executable, "-c", code, cwd=tmp_path, path=site) == f"{site}/pdserve/gateway/cli.py None True\n"
