"""May this worker join? Everything that makes two processes unable to serve one model together, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..transfer.errors import LayoutMismatch
from ..transfer.messages import Register

HEARTBEAT_INTERVAL_S = 0.2


@dataclass(frozen=True)
class ModelIdentity:
    """A model as this gateway serves it: its name in the API, where its files are, and their fingerprint."""

    name: str
    path: str
    fingerprint: str


def refusal(message: Register, identities: Mapping[str, ModelIdentity], others: Iterable[Register]) -> str:
    """Why `message` cannot be let in, naming both sides; empty if it can. `others` are registered for the same model,
    `identities` are what this gateway serves, by name."""
    identity = identities.get(message.model)
    if identity is None:
        names = " and ".join(map(repr, identities))
        return f"{message.worker} serves the model {message.model!r}, this gateway serves {names}"
    if message.layout.fingerprint != identity.fingerprint:
        return (
            f"the model files of {message.worker} differ from those of the gateway ({identity.path}): "
            f"fingerprint {message.layout.fingerprint[:12]} != {identity.fingerprint[:12]}"
        )
    if message.role == "decode" and not (message.bulk_address and message.peer_address):
        return f"{message.worker} is a decode worker without bulk_address and peer_address"
    for other in others:
        try:
            message.layout.require_equal(other.layout, message.worker, other.worker)
        except LayoutMismatch as error:
            return str(error)
    return ""


def succession(newcomer: Register, namesake: Register, silence_s: float) -> Literal["replace", "wait", "refuse"]:
    """What to do with a worker that bears the name of a registered one, which was heard of `silence_s` ago.

    A worker that woke up under a new incarnation is the same process, whatever its old self still had under way.
    """
    if silence_s >= 5 * HEARTBEAT_INTERVAL_S:
        return "replace"
    same_process = (newcomer.host, newcomer.pid) == (namesake.host, namesake.pid)
    return "wait" if same_process or silence_s >= 2 * HEARTBEAT_INTERVAL_S else "refuse"
