"""Systems that several tests share, since a start costs seconds, and the logs of a system whose test failed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.exact.reference import Reference, demo_reference
from tests.system.harness import Launch, System
from tests.system.tiny_model import load_tiny_llama, write_tiny_llama

DEMO_DECODE_BLOCKS = 96
DEMO_DECODE_BLOCK_SIZE = 32
DEMO_POOL_TOKENS = DEMO_DECODE_BLOCKS * DEMO_DECODE_BLOCK_SIZE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        launches = {name: value for name, value in item.funcargs.items() if isinstance(value, Launch)}
        report.sections += [(f"log of {name}", launch.log_tail()) for name, launch in launches.items()]
    return report


@pytest.fixture(scope="session")
def demo_system() -> Iterator[System]:
    """The demo model on 1 prefill + 1 decode worker that never computes a prompt; blocks of 16 and 32 tokens."""
    flags = ("--local-prefill", "never", "--prefill-block-size", 16, "--decode-block-size", DEMO_DECODE_BLOCK_SIZE)
    sizes = ("--kv-blocks", DEMO_DECODE_BLOCKS, "--prefill-kv-blocks", 512, "--chunk-tokens", 56)
    with System("demo", *flags, *sizes, "--check-invariants") as system:
        yield system


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The demo model as transformers runs it."""
    return demo_reference()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories, `tiny` and `other/tiny`, with different weights and the same name."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_llama(root / "tiny", seed=7)
    write_tiny_llama(root / "other" / "tiny", seed=8)
    return root


@pytest.fixture(scope="session")
def tiny(tiny_models: Path) -> Path:
    return tiny_models / "tiny"


@pytest.fixture
def tiny_reference(tiny: Path, tmp_path: Path) -> Reference:
    return Reference(lambda: load_tiny_llama(tiny), "tiny", tmp_path / "reference")


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A private directory for the sockets of processes that are launched one by one."""
    path = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
