"""Available memory is the least that the machine and every enclosing cgroup leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.engine.memory import available_memory_bytes, host_available_bytes

MIB = 1024**2


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:    1024000 kB\nHugePages_Total: 0\n")
    return tmp_path / "proc"


def v2_group(path: Path, limit: str, current: int, inactive_file: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_a_cgroup_the_machine_decides(proc: Path, tmp_path: Path) -> None:
    assert host_available_bytes(proc, tmp_path / "none") == 1024000 * 1024


def test_a_v2_limit_above_the_own_group_counts_and_its_page_cache_is_free(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/pod/app\n")
    root = tmp_path / "cgroup"
    v2_group(root / "pod/app", "max", 10 * MIB)
    v2_group(root / "pod", str(100 * MIB), 70 * MIB, inactive_file=20 * MIB)
    assert host_available_bytes(proc, root) == 50 * MIB


def test_inside_a_container_the_limit_at_the_mounted_root_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/only/known/outside\n")
    v2_group(tmp_path / "cgroup", str(64 * MIB), 4 * MIB)
    assert host_available_bytes(proc, tmp_path / "cgroup") == 60 * MIB


def test_a_v1_limit_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("4:cpu,cpuacct:/x\n3:memory:/job\n1:name=systemd:/\n")
    group = tmp_path / "cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(30 * MIB))
    (group / "memory.usage_in_bytes").write_text(str(25 * MIB))
    (group / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {2 * MIB}\n")
    assert host_available_bytes(proc, tmp_path / "cgroup") == 7 * MIB


def test_a_group_over_its_limit_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    v2_group(tmp_path / "cgroup", str(10 * MIB), 12 * MIB)
    assert host_available_bytes(proc, tmp_path / "cgroup") == 0


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory_bytes(torch.device("cpu")) < 1 << 50
