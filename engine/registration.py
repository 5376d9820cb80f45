"""How a worker joins the gateways that its flags name, and what it says of itself there."""

from __future__ import annotations

import os
from typing import Any, Literal

import zmq

from ..transfer.channel import FrameCounts
from ..transfer.links import offered
from ..transfer.membership import Membership
from ..transfer.messages import Register
from .setup import Engine
from .worker_flags import WorkerConfig


def membership(context: zmq.Context[Any], config: WorkerConfig, counts: FrameCounts) -> Membership:
    return Membership(
        context, config.name, config.gateways, counts, config.death_bound_s, config.drain_timeout_s, config.curve
    )


def registration(
    worker: str,
    role: Literal["prefill", "decode"],
    config: WorkerConfig,
    engine: Engine,
    host: str,
    max_sequences: int,
    addresses: tuple[str, str] = ("", ""),
) -> Register:
    """`worker`: with its incarnation; `addresses`: for slabs and for control, of a decode worker."""
    return Register(
        worker=worker,
        role=role,
        model=config.engine.served_model_name,
        layout=engine.model.layout,
        host=host,
        bulk_address=addresses[0],
        peer_address=addresses[1],
        links=offered(config.link, engine.device is not None),
        block_size=engine.pool.block_size,
        num_blocks=engine.pool.num_blocks,
        max_model_len=engine.model.max_model_len,
        max_sequences=max_sequences,
        pid=os.getpid(),
        device=engine.device.identity if engine.device else None,
    )
