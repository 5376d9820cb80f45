"""A prefill and a decode worker whose KV moves through device memory: the same tokens however late the devices are,
and whatever cannot be done is said and done over sockets. On a device made of host memory, see bench/device_fake.py."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import pdserve.decode.intake
import pdserve.engine.runner
from pdserve.bench.device_fake import DeviceCache, FakeDevice
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.model import LoadedModel
from pdserve.engine.setup import Engine
from pdserve.transfer import link_cuda_ipc
from pdserve.transfer.messages import Peer, Peers
from pdserve.transfer.offers import DeviceIdentity
from tests.engine.tiny_models import build, load, prompts, reference
from tests.test_worker_pair import dispatch, settle
from tests.worker_rig import Rig

PROMPTS = prompts([50, 3, 33, 61, 40, 17])
# For each copy and event that nobody waits for. Decode's device, the first, is the later one: when a prompt has been
# handed over, most of it is still to be copied into its blocks.
LAGS_S = (0.02, 0.005)
HERE = DeviceIdentity("aa", "0000:01:00.0", "", "boot", 11, 12, os.getpid())


def compute_in_order(model: LoadedModel, device: FakeDevice) -> None:
    """The model computes on the host at once. Let every layer wait for the compute stream, as its kernels would, which
    are launched there. Layers look the cache's tensors up only once: they keep their addresses."""
    layers = model.module.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: device.synchronize(device.compute_stream))


class DeviceRig(Rig):
    """Every worker has a device of its own, in the order in which they are started."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.devices: list[FakeDevice] = []
        self.changes: list[dict[str, object]] = []  # to the identities of the next devices
        self._pids = itertools.count(1)
        self.engine = self.device_engine

    def device_engine(self, num_blocks: int, block_size: int) -> Engine:
        change = self.changes.pop(0) if self.changes else {}
        lag_s = LAGS_S[bool(self.devices)]
        device = FakeDevice(dataclasses.replace(HERE, **{"pid": next(self._pids), **change}), lag_s=lag_s)
        self.devices.append(device)
        model = load(build("llama"))
        compute_in_order(model, device)
        cache = DeviceCache(model.layout, num_blocks, block_size, device)
        return Engine(model, cache, BlockPool(num_blocks, block_size), device=device)

    def start_decode(self, num_blocks: int = 96, **change: object) -> str:  # room for all prompts at once
        return super().start_decode(num_blocks, **change)

    def close(self) -> None:
        super().close()
        for device in self.devices:
            device.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRig]:
    monkeypatch.setattr(link_cuda_ipc, "GRACE_S", 0.05)
    monkeypatch.setattr(pdserve.decode.intake, "SILENT_S", 0.3)
    monkeypatch.setattr(pdserve.engine.runner, "straight_model", lambda *_: None)  # as on a device
    rig = DeviceRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def golden() -> list[list[int]]:
    model = build("llama")
    return [reference(model, prompt, 10) for prompt in PROMPTS]


def run_all(rig: Rig, prefill: str, decode: str, golden: list[list[int]]) -> dict[str, float]:
    """All prompts through both workers; returns bytes by link."""
    for i, prompt in enumerate(PROMPTS):
        dispatch(rig, f"r{i}", prompt, prefill, decode)
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(len(PROMPTS))), "all have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(len(PROMPTS))] == golden
    settle(rig, prefill, decode)
    shares = {
        link: rig.metric(decode, "pdserve_transfer_bytes_total", link=link) for link in ("cuda_ipc", "shm", "zmq")
    }
    assert sum(shares.values()) == sum(map(len, PROMPTS)) * rig.registered[decode].layout.bytes_per_token
    return shares


def test_tokens_through_device_memory_equal_the_reference(rig: DeviceRig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    assert [link.link for link in rig.links(prefill)] == ["cuda_ipc"]
    shares = run_all(rig, prefill, decode, golden)
    assert shares["shm"] == shares["zmq"] == 0
    assert rig.metric(prefill, "pdserve_links", link="cuda_ipc") == 1


def test_blocks_are_computed_anew_only_after_they_were_copied_out(rig: DeviceRig, golden: list[list[int]]) -> None:
    decode = rig.start_decode()
    prefill = rig.start_prefill(num_blocks=9)  # room for hardly more than one prompt
    rig.introduce(prefill, decode)
    assert run_all(rig, prefill, decode, golden)["zmq"] == 0


def test_slabs_that_find_no_room_in_device_memory_follow_their_headers(rig: DeviceRig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair(decode_ring_bytes=8192)
    shares = run_all(rig, prefill, decode, golden)
    assert min(shares["cuda_ipc"], shares["zmq"]) > 0


def test_the_memory_of_a_sender_that_has_left_is_freed(rig: DeviceRig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    run_all(rig, prefill, decode, golden)
    assert rig.devices[0].live_allocations == 1
    worker, thread = rig.workers.pop()
    worker.stop()
    thread.join(10)
    rig.until(lambda: rig.devices[0].live_allocations == 0, "the ring is freed")


def test_choices_and_requests_that_share_a_prompt_begin_with_all_of_it(rig: DeviceRig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    dispatch(rig, "choices", PROMPTS[0], prefill, decode, n=2)  # the last block is copied for the second
    rig.until(lambda: bool(rig.tokens("choices")), "the prompt has arrived")
    assert dispatch(rig, "again", PROMPTS[0], prefill, decode).held_tokens > 0  # the others are in decode's cache
    rig.until(lambda: rig.finished("choices") == {0, 1}, "both choices have finished")
    rig.until(lambda: rig.finished("again") == {0}, "the other request has finished")
    assert rig.tokens("choices") == {0: golden[0], 1: golden[0]}
    assert rig.tokens("again")[0] == golden[0]
    settle(rig, prefill, decode)


def test_what_the_driver_refuses_is_said_and_sockets_are_used(rig: DeviceRig, golden: list[list[int]]) -> None:
    decode = rig.start_decode()
    prefill = rig.start_prefill()
    rig.devices[1].refuses_imports = "the other's memory cannot be opened: cudaErrorInvalidDevice"
    rig.introduce(prefill, decode)
    (link,) = rig.links(prefill)
    assert (link.link, link.state) == ("zmq", "linked")
    assert "cudaErrorInvalidDevice" in link.detail
    assert run_all(rig, prefill, decode, golden)["zmq"] > 0
    assert rig.metric(prefill, "pdserve_link_refusals", link="cuda_ipc", reason="unavailable") == 1
    rig.until(lambda: rig.devices[0].live_allocations == 0, "the ring is freed")


@pytest.mark.parametrize(
    ("change", "reason"), [({"uuid": "bb"}, "no_peer_access"), ({"pid_namespace": 1}, "other_container")]
)
def test_devices_that_cannot_share_memory_are_known_before_any_is_made(
    rig: DeviceRig, golden: list[list[int]], change: dict[str, object], reason: str
) -> None:
    rig.changes = [change]
    prefill, decode = rig.pair()
    assert [link.link for link in rig.links(prefill)] == ["zmq"]
    assert rig.devices[0].live_allocations == 0
    assert run_all(rig, prefill, decode, golden)["zmq"] > 0
    assert rig.metric(prefill, "pdserve_link_refusals", link="cuda_ipc", reason=reason) == 1


def test_whoever_wants_nothing_but_device_memory_gets_no_other_link(rig: DeviceRig) -> None:
    decode = rig.start_decode(link="cuda_ipc")
    prefill = rig.start_prefill(link="cuda_ipc")
    rig.devices[1].refuses_imports = "no"
    register = rig.registered[decode]
    peer = Peer(decode, "here", register.bulk_address, register.peer_address, register.links, register.device)
    rig.send(prefill, Peers([peer]))
    rig.until(lambda: any(link.state == "refused" for link in rig.links(prefill)), "the link is refused")
    assert rig.links(prefill)[0].detail == "cuda_ipc: no"
