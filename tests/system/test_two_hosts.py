"""The pools on two machines: two network namespaces with a cable between them, and CURVE keys as in the README."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.exact.reference import generate
from tests.system.harness import PDSERVE, Launch, Surface, eventually
from tests.system.tiny_model import load_tiny_llama, random_prompt

pytestmark = pytest.mark.timeout(300, method="signal")

CLONE_NEWNET = 0x40000000
FIRST_IP, SECOND_IP = "10.231.77.1", "10.231.77.2"
CONTROL = f"tcp://{FIRST_IP}:7100"
HTTP_PORT = 8000
ASK = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}

T = TypeVar("T")


def ip(*arguments: str) -> None:
    """Run `ip`. Raises OSError or CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@dataclass
class Hosts:
    """Two network namespaces."""

    first: str
    second: str

    def prefix(self, host: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", host)

    def cable(self, state: str) -> None:
        ip("-n", self.first, "link", "set", "cable", state)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    mark = uuid.uuid4().hex[:6]
    hosts = Hosts(f"pds-{mark}-a", f"pds-{mark}-b")
    with ExitStack() as stack:
        try:
            for name in (hosts.first, hosts.second):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", "cable", "netns", hosts.second)
            ip("-n", hosts.first, "link", "add", "cable", "type", "veth", *peer)
            for name, address in ((hosts.first, FIRST_IP), (hosts.second, SECOND_IP)):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
        except FileNotFoundError:
            pytest.skip("there is no `ip` command")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
        yield hosts


@dataclass
class Inside:
    """A client on the first host: its calls run on a thread that has moved there."""

    surface: Surface
    thread: ThreadPoolExecutor

    def __call__(self, call: Callable[[Surface], T]) -> T:
        return self.thread.submit(call, self.surface).result(timeout=120)


def move_to(namespace: str) -> None:
    """Sockets of this thread belong to that namespace from now on."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture
def inside(hosts: Hosts, tiny: Path) -> Iterator[Inside]:
    with ThreadPoolExecutor(1, initializer=move_to, initargs=(hosts.first,)) as thread:
        surface = thread.submit(Surface, HTTP_PORT, tiny.name).result(10)
        yield Inside(surface, thread)
        surface.client.close()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """The cluster's keys on the first host, and their copy on the second."""
    first, second = tmp_path / "keys-a", tmp_path / "keys-b"
    command = [sys.executable, "-P", "-c", PDSERVE, "keys", str(first)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    shutil.copytree(first, second)
    return first, second


def moved_bytes(surface: Surface) -> float:
    """By the worker's last heartbeat."""
    return surface.metric("pdserve_transfer_bytes_total", role="decode")


def test_a_prefill_and_a_decode_worker_on_two_hosts_serve_over_encrypted_tcp(
    hosts: Hosts, inside: Inside, keys: tuple[Path, Path], tiny: Path, runtime: Path
) -> None:
    prompt = random_prompt(1, 100)
    expected = generate(load_tiny_llama(tiny), prompt, ASK["max_tokens"], ignore_eos=True)
    common = ("--model", tiny)
    kv = ("--kv-blocks", 512)
    with ExitStack() as stack:

        def launch(host: str, *arguments: object) -> Launch:
            launched = Launch(*arguments, *common, runtime=runtime, prefix=hosts.prefix(host))
            stack.callback(launched.kill_all)
            return launched

        gateway = launch(
            hosts.first, "gateway", "--port", HTTP_PORT, "--listen", CONTROL, "--keys", keys[0],
            "--local-prefill", "never",
        )  # fmt: skip
        workers = [
            launch(hosts.first, "prefill", "--name", "prefill-0", "--gateway", CONTROL, "--keys", keys[0], *kv),
            launch(
                hosts.second, "decode", "--name", "decode-0", "--gateway", CONTROL, "--keys", keys[1], *kv,
                "--listen", "tcp://0.0.0.0:7200", "--advertise", f"tcp://{SECOND_IP}:7200",
            ),
        ]  # fmt: skip
        try:
            inside(lambda surface: surface.wait_linked(1, 1, 120))
            assert inside(lambda surface: surface.client.complete(prompt, **ASK)).token_ids == expected
            inside(lambda surface: eventually(lambda: moved_bytes(surface) > 0, 10, "the KV went over the cable"))
            ids = {worker["name"]: worker["id"] for worker in inside(lambda surface: surface.workers())}

            hosts.cable("down")
            eventually(lambda: inside(ready) == 503, 15, "the other host is given up")
            hosts.cable("up")
            inside(lambda surface: surface.wait_linked(1, 1, 30))
            assert inside(lambda surface: surface.client.complete(prompt, **ASK)).token_ids == expected
            now = {worker["name"]: worker["id"] for worker in inside(lambda surface: surface.workers())}
            assert now == ids, "both processes lived on: they were not away, the cable was"
            inside(lambda surface: surface.assert_idle())

            for process in (*workers, gateway):
                process.send_signal(signal.SIGTERM)
                assert process.wait(20).code == 0
                assert "Traceback" not in process.stderr
        except BaseException as error:
            error.add_note("\n".join(process.log_tail(40) for process in (gateway, *workers)))
            raise


def ready(surface: Surface) -> int:
    return surface.client.get("/ready").status_code


def test_beyond_this_machine_nothing_listens_without_keys_or_a_word(tiny: Path, runtime: Path) -> None:
    for flags in (
        ("gateway", "--port", 0, "--listen", "tcp://0.0.0.0:7100"),
        ("decode", "--name", "d", "--gateway", "ipc:///nowhere", "--listen", "tcp://0.0.0.0:7200"),
        ("prefill", "--name", "p", "--gateway", "tcp://10.231.77.1:7100"),
    ):
        result = Launch(*flags, "--model", tiny, runtime=runtime).wait(60)
        assert result.code == 2, result.stderr
        (line,) = result.last_words
        assert "--keys" in line
        assert "--insecure" in line
