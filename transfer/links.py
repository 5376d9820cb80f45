"""Which link a prefill and a decode worker can use, and why not a better one.

`shm` moves slabs through a ring in shared memory (`ring.py`) between workers of one machine; `zmq` moves them as frames
of a socket, anywhere. In both cases headers, handoffs and credits go through the same sockets in the same order, so a
slab that finds no room in the ring can follow its header as a frame.
"""

from __future__ import annotations

from typing import Literal

from .messages import Peer

LinkMode = Literal["auto", "shm", "zmq"]

OFFERED: dict[LinkMode, list[str]] = {"auto": ["shm", "zmq"], "shm": ["shm"], "zmq": ["zmq"]}


def best_link(mode: LinkMode, host: str, peer: Peer) -> tuple[str, str]:
    """(link, why not a better one) for a prefill worker on `host`; the link is "" when the two have none in common."""
    mine = OFFERED[mode]
    why = ""
    if "shm" in mine and "shm" in peer.links:
        if host == peer.host:
            return "shm", ""
        why = f"shm: {peer.worker} is on {peer.host}, this worker on {host}"
    elif "shm" in mine:
        why = f"shm: {peer.worker} does not offer it (--link)"
    if "zmq" in mine and "zmq" in peer.links:
        return "zmq", why
    return "", why or f"{peer.worker} offers {', '.join(peer.links)} only"
