"""Which link a prefill and a decode worker can use, and why not a better one.

`cuda_ipc` moves slabs through a ring in the decode worker's device memory (`link_cuda_ipc.py`), `shm` through a ring in
shared memory (`ring.py`) between workers of one machine that compute on its processors; `zmq` moves them as frames of a
socket, anywhere. In all cases headers, handoffs and credits go through the same sockets in the same order, so a slab
that finds no room in the ring can follow its header as a frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .device import Device
from .messages import Peer
from .offers import DeviceIdentity

LinkMode = Literal["auto", "cuda_ipc", "shm", "zmq"]


@dataclass(frozen=True)
class Refusal:
    """Why a link cannot be used: `reason` labels a metric, `text` is for people."""

    link: str
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.link}: {self.text}"


def offered(mode: LinkMode, on_device: bool) -> list[str]:
    """The links a worker would use, best first."""
    if mode == "auto":
        return ["cuda_ipc", "zmq"] if on_device else ["shm", "zmq"]
    return [mode]


def best_link(mode: LinkMode, host: str, device: Device | None, peer: Peer) -> tuple[str, Refusal | None]:
    """(link, why not a better one) for a prefill worker on `host`; the link is "" when the two have none in common."""
    why: Refusal | None = None
    for link in offered(mode, device is not None):
        refusal = _refusal(link, host, device, peer)
        if refusal is None:
            return link, why
        why = why or refusal
    return "", why


def _refusal(link: str, host: str, device: Device | None, peer: Peer) -> Refusal | None:
    if link not in peer.links:
        offers = ", ".join(peer.links)
        return Refusal(link, "not_offered", f"{peer.worker} does not offer it (--link), it offers {offers} only")
    if link == "shm" and host != peer.host:
        return Refusal(link, "other_host", f"{peer.worker} is on {peer.host}, this worker on {host}")
    if link == "cuda_ipc":
        return device_refusal(device, peer.device, peer.worker)
    return None


def device_refusal(device: Device | None, theirs: DeviceIdentity | None, worker: str) -> Refusal | None:
    """Why `device` cannot open memory of the device of `worker`, as far as can be known before it is tried."""

    def refusal(reason: str, text: str) -> Refusal:
        return Refusal("cuda_ipc", reason, text)

    if device is None or theirs is None:
        return refusal("no_device", f"{'this worker' if device is None else worker} does not compute on a CUDA device")
    mine = device.identity
    if mine.boot != theirs.boot:
        return refusal("other_host", f"{worker} runs on another machine")
    if (mine.pid_namespace, mine.ipc_namespace) != (theirs.pid_namespace, theirs.ipc_namespace):
        return refusal("other_container", f"{worker} runs in another container (other pid or ipc namespace)")
    if mine.pid == theirs.pid:
        return refusal("same_process", f"{worker} runs in this process, which cannot open memory of its own")
    for identity, whose in ((mine, "this worker"), (theirs, worker)):
        if identity.slice:
            return refusal("mig", f"{whose} runs on a MIG slice ({identity.slice}), whose memory stays its own")
    if mine.uuid != theirs.uuid and (why_not := device.reaches(theirs)):
        return refusal("no_peer_access", why_not)
    return None
