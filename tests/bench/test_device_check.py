"""The device check is whole: its dry run passes, on no more packages than a CUDA image has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench import device_run
from pdserve.bench.device_report import WHOLE, Check, Setting, outcome, status, table

ROOT = Path(__file__).parents[2]
ABSENT = ("fastapi", "starlette", "uvicorn", "gguf", "aiohttp", "xgrammar", "accelerate", "openai", "rich", "typer")
GPU_PACKAGES = {"attention": "triton", "rows": "triton", "compile": "cupy_backends"}  # which not every machine has
DRY, GPU = Setting(torch.device("cpu"), dry=True), Setting(torch.device("cuda"), dry=False)
WITHOUT = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest, **more: (
    None if name.partition(".")[0] in {absent!r} else found(name, *rest, **more)
)
"""


def dry_run(tmp_path: Path, absent: tuple[str, ...], *flags: str) -> dict[str, Any]:
    """The script as it is started on a device, in processes that cannot import some packages."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(absent=absent))
    path = os.pathsep.join([str(tmp_path), str(ROOT / "build" / "import")])
    done = subprocess.run(
        [sys.executable, "bench/device_check.py", "--dry", "--out", str(tmp_path / "result.json"), *flags],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    return result


@pytest.mark.timeout(300)
def test_the_dry_run_passes_every_section_without_what_a_cuda_image_lacks(tmp_path: Path) -> None:
    result = dry_run(tmp_path, ABSENT)
    unable = {section for section, package in GPU_PACKAGES.items() if find_spec(package) is None}
    assert {name: status for name, status in result["sections"].items() if name not in unable} == {
        name: "ok" for name in device_run.SECTIONS if name not in unable
    }
    assert (result["wrong"], result["not_run"], result["missed"], result["dry"]) == (0, len(unable), 0, True)
    assert {check["section"] for check in result["checks"]} == set(device_run.SECTIONS)
    texts = [check for check in result["checks"] if check["name"].startswith("text equals generate")]
    assert [check["value"] for check in texts] == [18, 18]
    (link,) = [check for check in result["checks"] if check["name"].startswith("cuda_ipc")]
    assert "stand-in" in link["note"]


@pytest.mark.timeout(300)
def test_a_dry_run_says_which_package_a_section_lacks_and_the_others_still_run(tmp_path: Path) -> None:
    lacking = {"attention": "triton", "rows": "triton", "compile": "cupy_backends", "pair": "zmq"}
    sections = [*lacking, "decode step"]
    flags = [flag for section in sections for flag in ("--only", section)]
    result = dry_run(tmp_path, (*ABSENT, *lacking.values(), "cupy"), *flags)
    expected = {section: f"not run: no {package}" for section, package in lacking.items()}
    assert result["sections"] == expected | {"decode step": "ok"}
    assert (result["wrong"], result["not_run"]) == (0, len(lacking))


@pytest.mark.parametrize(
    ("setting", "lacking", "ok"), [(DRY, "triton", True), (GPU, "triton", False), (DRY, "pdserve.lost", False)]
)
def test_only_a_dry_run_may_lack_packages_and_no_run_a_module_of_ours(
    monkeypatch: pytest.MonkeyPatch, setting: Setting, lacking: str, ok: bool
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(name=lacking)

    monkeypatch.setattr(device_run.importlib, "import_module", import_module)
    (check,) = device_run._run("rows", setting)
    assert check == Check(WHOLE, ok, note=f"not run: no {lacking.partition('.')[0]}")
    assert status([check]) == (check.note if ok else "WRONG")


SECTION = "decode step"


def run_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Any
) -> tuple[int, dict[str, Any]]:
    class Module:
        pass

    Module.run = staticmethod(run)  # type: ignore[attr-defined]
    monkeypatch.setattr(device_run.importlib, "import_module", lambda name: Module)
    code = device_run.main(["--dry", "--only", SECTION])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_section_that_breaks_off_is_wrong_and_what_it_found_before_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(setting: Setting) -> Any:
        assert setting.dry
        yield Check("first", ok=True, value=3.0, unit="GB/s", target=">= 2", met=True)
        raise RuntimeError("an illegal memory access\nwas encountered")

    code, result = run_with(monkeypatch, capsys, run)
    assert (code, result["wrong"], result["missed"]) == (1, 1, 0)
    assert result["sections"] == {SECTION: "WRONG"}
    assert [check["name"] for check in result["checks"]] == ["first", WHOLE]
    assert result["checks"][1]["note"] == "RuntimeError: an illegal memory access was encountered"


def test_a_section_that_says_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run_with(monkeypatch, capsys, lambda setting: iter([]))
    assert (code, result["sections"]) == (1, {SECTION: "WRONG"})


def test_a_missed_target_is_counted_but_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run_with(monkeypatch, capsys, lambda setting: iter([Check("slow", ok=True, value=1.0, met=False)]))
    assert (code, result["wrong"], result["missed"]) == (0, 0, 1)


def test_without_a_gpu_only_a_dry_run_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_run.main([]) == 2
    assert "no usable CUDA device here" in capsys.readouterr().err


def test_the_device_has_a_number_as_torch_wants_it() -> None:
    assert [str(device_run._numbered(name)) for name in ("cuda", "cuda:0", "cuda:3")] == ["cuda:0", "cuda:0", "cuda:3"]


def test_the_table_names_every_outcome() -> None:
    checks = [Check("a", ok=True), Check("b", ok=False), Check("c", ok=True, met=True), Check("d", ok=True, met=False)]
    checks.append(Check("e", ok=True, note="not run: no module"))
    assert [outcome(check) for check in checks] == ["ok", "WRONG", "met", "missed", "not run"]
    lines = table([("kernels", check) for check in checks]).splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["ok", "WRONG", "met", "missed"]
    assert lines[5].endswith("not run  not run: no module")
