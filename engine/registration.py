"""What a worker says of itself when it registers at a gateway."""

from __future__ import annotations

import os
from typing import Literal

from ..transfer.links import offered
from ..transfer.messages import Register
from .setup import Engine
from .worker_flags import WorkerConfig


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
