"""The measurement of cuda_ipc moves what it says it moves, seen without a device; what it is for runs on one only."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import threading

import pytest
import torch

from pdserve.bench.device_fake import DeviceCache, FakeDevice
from pdserve.bench.device_report import Setting
from pdserve.bench.device_transfer import Job, receive, run, send
from pdserve.kernels import cache_ops
from pdserve.transfer.layout import LayerShape
from pdserve.transfer.offers import DeviceIdentity

JOB = Job(tokens=40, rounds=3, ring_bytes=8192, shape=LayerShape(2, 8, 12))
HERE = DeviceIdentity("aa", "0000:01:00.0", "", "boot", 11, 12, os.getpid())


@pytest.mark.parametrize("harm", [False, True])
def test_both_ends_move_every_slab_and_notice_a_wrong_byte(harm: bool) -> None:
    mine, theirs = multiprocessing.Pipe()
    devices = [FakeDevice(dataclasses.replace(HERE, pid=pid), lag_s=0.0002) for pid in (1, 2)]
    sides = [DeviceCache(JOB.layout, 3, 16, device) for device in devices]
    arguments = (theirs, devices[0], sides[0], [2, 0, 1], JOB)
    sender = threading.Thread(target=send, args=arguments, daemon=True)
    sender.start()
    table = [1, 2, 0]
    if harm:
        scatter = sides[1].scatter_from
        sides[1].scatter_from = lambda layer, table, *rest: scatter(layer, table[::-1], *rest)  # type: ignore[method-assign]
    elapsed_s, right = receive(mine, devices[1], sides[1], table, JOB)
    sender.join(20)
    assert not sender.is_alive()
    assert elapsed_s > 0
    assert right is not harm
    assert devices[1].live_allocations == 0
    for device in devices:
        device.close()


def test_operations_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(cache_ops, "copy_block", lambda caches, *_: caches[0].view(-1)[0].fill_(next(numbers)))
    checks = run(Setting(torch.device("cpu"), dry=True))
    compared = list(itertools.takewhile(lambda check: "to the byte" in check.name, checks))
    assert compared
    assert not any(check.ok for check in compared)
