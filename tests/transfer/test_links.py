"""A pair uses the best link both ends offer, and says why it does not use a better one."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.bench.device_fake import FakeDevice
from pdserve.transfer.links import best_link, offered
from pdserve.transfer.messages import Peer
from pdserve.transfer.offers import DeviceIdentity

MINE = DeviceIdentity("aa", "0000:01:00.0", "", "boot", 11, 12, 1000)
THEIRS = dataclasses.replace(MINE, pid=1001)


@pytest.mark.parametrize(
    ("mode", "host", "offers", "link", "named"),
    [
        ("auto", "here", ["shm", "zmq"], "shm", ""),
        ("auto", "there", ["shm", "zmq"], "zmq", "there"),
        ("auto", "here", ["zmq"], "zmq", "does not offer"),
        ("zmq", "here", ["shm", "zmq"], "zmq", ""),
        ("shm", "here", ["shm"], "shm", ""),
        ("shm", "there", ["shm", "zmq"], "", "there"),
        ("zmq", "here", ["shm"], "", "shm only"),
        ("shm", "here", ["zmq"], "", "does not offer"),
        ("cuda_ipc", "here", ["shm", "zmq"], "", "does not offer"),
        ("auto", "here", ["cuda_ipc", "zmq"], "zmq", "does not offer"),
    ],
)
def test_the_best_common_link_is_used_and_what_bars_a_better_one_is_named(mode, host, offers, link, named) -> None:
    found, why = best_link(mode, host, None, Peer("decode-0#00000000", "here", "ipc://a", "ipc://b", offers))
    assert found == link
    assert bool(why) == bool(named)
    assert named in str(why)


@pytest.mark.parametrize(
    ("mine", "theirs", "reason", "named"),
    [
        ({}, {}, "", ""),
        ({}, {"uuid": "bb", "bus": "0000:02:00.0"}, "", ""),  # another device, within reach
        ({}, {"uuid": "cc", "bus": "0000:03:00.0"}, "no_peer_access", "0000:03:00.0"),
        ({}, {"boot": "another"}, "other_host", "another machine"),
        ({}, {"pid_namespace": 13}, "other_container", "another container"),
        ({}, {"ipc_namespace": 13}, "other_container", "another container"),
        ({}, {"pid": 1000}, "same_process", "this process"),
        ({}, {"slice": "NVIDIA H100 MIG 1g.10gb"}, "mig", "MIG 1g.10gb"),
        ({"slice": "NVIDIA H100 MIG 2g.20gb"}, {}, "mig", "this worker runs on a MIG slice"),
        ({}, None, "no_device", "decode-0#00000000 does not compute on a CUDA device"),
    ],
)
def test_devices_that_cannot_share_memory_use_sockets_and_say_why(mine, theirs, reason, named) -> None:
    device = FakeDevice(dataclasses.replace(MINE, **mine), reachable={"bb"})
    identity = None if theirs is None else dataclasses.replace(THEIRS, **theirs)
    peer = Peer("decode-0#00000000", "here", "ipc://a", "ipc://b", offered("auto", True), identity)
    link, why = best_link("auto", "here", device, peer)
    assert link == ("zmq" if reason else "cuda_ipc")
    assert (why.reason if why else "") == reason
    assert named in str(why)
    assert best_link("cuda_ipc", "here", device, peer)[0] == ("" if reason else "cuda_ipc")
    device.close()


def test_a_worker_on_a_device_does_not_offer_memory_of_the_host_unasked() -> None:
    assert offered("auto", True) == ["cuda_ipc", "zmq"]
    assert offered("auto", False) == ["shm", "zmq"]
    assert offered("shm", True) == ["shm"]
