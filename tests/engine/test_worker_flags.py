"""Flags of a worker that cannot work are named before anything starts."""

from __future__ import annotations

import argparse

import pytest

from pdserve.engine.worker_flags import add_worker_arguments, worker_config
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.ring import RingWriter


def config_of(*flags: str):
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    needed = ("--gateway", "ipc:///tmp/gateway", "--name", "prefill-0", "--model", "/nowhere")
    return worker_config(parser.parse_args([*needed, *flags]))


@pytest.mark.parametrize("size", ["1", "63", "2T", "999T"])
def test_a_ring_of_no_possible_size_is_named(size: str) -> None:
    with pytest.raises(ConfigError, match="--ring-memory"):
        config_of("--ring-memory", size)


@pytest.mark.parametrize("size", ["64", "100", "4K"])
def test_the_smallest_rings_can_be_made(size: str) -> None:
    ring = RingWriter(config_of("--ring-memory", size).ring_bytes)
    assert ring.allocate(64) is not None
    ring.close()
