"""What cannot work says so in one line and leaves nothing running; what lacks workers answers 503."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.client import Refused
from tests.system.harness import Gateway, Launch, free_port

pytestmark = pytest.mark.timeout(120, method="signal")

EXIT_CONFIG = 2
EXIT_REFUSED = 3
GIVE_UP_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def lone_gateway(tiny: Path) -> Iterator[Gateway]:
    """A gateway that no worker has registered with."""
    with Gateway("gateway", "--model", tiny, model="tiny", port=free_port()) as gateway:
        gateway.wait_alive()
        yield gateway


def assert_gives_up(launch: Launch, code: int, *words: str) -> None:
    """The launch ends by itself, with one line that holds all `words`, and nothing of it is left (see `wait`)."""
    result = launch.wait(GIVE_UP_WITHIN_S)
    assert result.code == code, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.last_words) == 1, result.stderr
    for word in words:
        assert word in result.last_words[0]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def scramble_header(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"\xff" * 64 + data[72:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def test_missing_model_directory_is_named(tmp_path: Path, runtime: Path) -> None:
    launch = Launch("up", "--model", tmp_path / "nothing-here", "--port", free_port(), runtime=runtime)
    assert_gives_up(launch, EXIT_CONFIG, "nothing-here")


def test_directory_without_a_model_is_named(tmp_path: Path, runtime: Path) -> None:
    launch = Launch("up", "--model", tmp_path, "--port", free_port(), runtime=runtime)
    assert_gives_up(launch, EXIT_CONFIG, tmp_path.name)


@pytest.mark.parametrize("damage", [truncate, scramble_header, empty])
def test_corrupt_weights_are_named(damage: Callable[[Path], None], tiny: Path, tmp_path: Path, runtime: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "broken")
    damage(model / "model.safetensors")
    launch = Launch("up", "--model", model, "--port", free_port(), runtime=runtime)
    assert_gives_up(launch, EXIT_CONFIG, "model.safetensors")


@pytest.mark.parametrize("command", ["up", "gateway"])
def test_port_in_use_is_named(command: str, tiny: Path, runtime: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = Launch(command, "--model", tiny, "--port", port, runtime=runtime)
        assert_gives_up(launch, EXIT_CONFIG, str(port))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_with_other_weights_is_refused_naming_the_field(role: str, tiny_models: Path, runtime: Path) -> None:
    address = f"ipc://{runtime}/control"
    gateway_flags = ("--model", tiny_models / "tiny", "--listen", address)
    with Gateway("gateway", *gateway_flags, model="tiny", port=free_port(), runtime=runtime) as gateway:
        gateway.wait_alive()
        flags = ("--gateway", address, "--name", f"{role}-0", "--kv-blocks", 64)
        worker = Launch(role, "--model", tiny_models / "other" / "tiny", *flags, runtime=runtime)
        assert_gives_up(worker, EXIT_REFUSED, f"{role}-0", "fingerprint")
        assert gateway.workers() == []
        assert gateway.client.get("/health").status_code == 200


def test_without_workers_requests_get_503_with_retry_after(lone_gateway: Gateway) -> None:
    for stream in (False, True):
        with pytest.raises(Refused) as refused:
            lone_gateway.client.chat([{"role": "user", "content": "anyone?"}], stream=stream)
        assert refused.value.status == 503
        assert int(refused.value.headers["retry-after"]) >= 1
        assert "worker" in refused.value.message


def test_without_workers_the_process_is_healthy_but_not_ready(lone_gateway: Gateway) -> None:
    assert lone_gateway.client.get("/health").status_code == 200
    assert lone_gateway.client.get("/ready").status_code == 503
    assert lone_gateway.workers() == []
    assert lone_gateway.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
