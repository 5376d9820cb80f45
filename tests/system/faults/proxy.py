"""A proxy on the links between prefill and decode workers, which can harm what passes.

Prefill workers connect to a ROUTER here. Behind it there is one DEALER per identity seen, with that same identity, so
the decode worker's own ROUTER cannot tell the difference. One proxy serves any number of decode workers, each with a
bulk and a control socket.

Run as a program: `proxy.py ROUTES`, where ROUTES is JSON: {link: {socket: [front address, back address]}}. Orders come
in on stdin and reports go out on stdout, one JSON object a line:

    in   {"arm": 7, "link": "decode-0", "socket": "bulk", "kinds": ["Slab"], "sender": "prefill-1", "harm": "drop",
          "count": 1, "delay_s": 0.5, "seed": 3}
    in   {"disarm": 7}
    out  {"struck": 7, "kind": "Slab", "request": "…", "attempt": 1, "sender": "prefill-1#…/2"}

Only frames on their way to decode are harmed on "bulk"; on "control" the answers are, too.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

POLL_MS = 20
FORGET_IDLE_S = 15.0  # identities of a worker's former lives
HIGH_WATER_MARK = 20_000  # frames for a decode worker that is frozen or dead; further ones are lost
REORDER_WAIT_S = 0.3  # how long a frame waits to be overtaken
HARMS = ("watch", "drop", "delay", "duplicate", "reorder", "corrupt_payload", "corrupt_header", "corrupt_token")
"""`watch` only reports; `corrupt_token` is the header's one bit that no later check of lengths or order would find."""

Parts = list[bytes]


@dataclass
class Rule:
    """What shall happen to the next `count` frames that fit."""

    arm: int
    link: str
    socket: str
    harm: str
    kinds: list[str] = field(default_factory=list)  # empty: every kind
    sender: str = ""  # name of the prefill worker; empty: any
    count: int = 1
    delay_s: float = 0.0
    seed: int = 0

    def fits(self, link: str, socket: str, identity: str, kind: str, num_parts: int) -> bool:
        name = identity.partition("#")[0]
        return (
            self.count > 0
            and (num_parts > 1 or self.harm != "corrupt_payload")
            and (self.link, self.socket) == (link, socket)
            and (not self.kinds or kind in self.kinds)
            and (not self.sender or self.sender == name)
        )


def first_object(frame: bytes) -> Any:
    """What the frame begins with; a checksum may follow."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(frame)
    return unpacker.unpack()


def header_of(parts: Parts) -> dict[str, Any]:
    """The message's fields; {} for what is not a message."""
    try:
        header = first_object(parts[0])
    except (ValueError, msgpack.OutOfData):
        return {}
    return header if isinstance(header, dict) else {}


def flip_token(frame: bytes) -> bytes:
    """Another first token in a handoff, for a single bit."""
    header = first_object(frame)
    at = frame.index(msgpack.packb("tokens") + bytes([0x90 + len(header["tokens"])])) + len("tokens") + 2
    number = msgpack.packb(header["tokens"][0])
    assert frame[at : at + len(number)] == number
    last = at + len(number) - 1
    return frame[:last] + bytes([frame[last] ^ 1]) + frame[last + 1 :]


def flip_bit(frame: bytes, rng: random.Random) -> bytes:
    harmed = bytearray(frame)
    at = rng.randrange(len(harmed) * 8)
    harmed[at // 8] ^= 1 << (at % 8)
    return bytes(harmed)


class Flow:
    """The frames of one identity on one socket, one way: order is kept, save for what a rule wants."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, Parts]] = deque()
        self._overtaken: tuple[float, Parts] | None = None

    def push(self, parts: Parts, now: float, rule: Rule | None) -> None:
        late = self._overtaken
        if rule is None:
            self._queue.append((now, parts))
        else:
            self._harm(parts, now, rule)
        if late is not None and self._overtaken is late:
            self._queue.append((now, late[1]))
            self._overtaken = None

    def _harm(self, parts: Parts, now: float, rule: Rule) -> None:
        rng = random.Random(rule.seed)
        match rule.harm:
            case "drop":
                return
            case "delay":
                self._queue.append((now + rule.delay_s, parts))
            case "duplicate":
                self._queue += [(now, parts), (now, parts)]
            case "reorder" if self._overtaken is None:
                self._overtaken = (now + REORDER_WAIT_S, parts)
            case "corrupt_payload" if len(parts) > 1:
                self._queue.append((now, [parts[0], flip_bit(parts[1], rng)]))
            case "corrupt_header":
                self._queue.append((now, [flip_bit(parts[0], rng), *parts[1:]]))
            case "corrupt_token":
                self._queue.append((now, [flip_token(parts[0]), *parts[1:]]))
            case _:
                self._queue.append((now, parts))

    def due(self, now: float) -> Iterator[Parts]:
        if self._overtaken is not None and now >= self._overtaken[0]:
            self._queue.append(self._overtaken)
            self._overtaken = None
        while self._queue and self._queue[0][0] <= now:
            yield self._queue.popleft()[1]


class Path:
    """One of a link's two sockets: a ROUTER in front, a DEALER per identity behind."""

    def __init__(self, context: zmq.Context[Any], link: str, socket: str, front: str, back: str) -> None:
        self.link, self.socket = link, socket
        self._context = context
        self._back_address = back
        self.front: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.front.setsockopt(zmq.LINGER, 0)
        self.front.bind(front)
        self.backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._flows: dict[tuple[bytes, bool], Flow] = {}
        self._heard_at: dict[bytes, float] = {}

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self.front, *self.backs.values()]

    def take_in(self, rules: list[Rule], struck: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        for identity, *parts in _drain(self.front):
            if identity not in self.backs:
                self._connect(identity)
            self._heard_at[identity] = now
            self._push(identity, parts, True, rules, struck)
        for identity, back in list(self.backs.items()):
            for parts in _drain(back):
                self._push(identity, parts, False, rules, struck)

    def _connect(self, identity: bytes) -> None:
        back: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.LINGER, 0)
        back.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        back.setsockopt(zmq.IDENTITY, identity)
        back.connect(self._back_address)
        self.backs[identity] = back

    def _push(
        self, identity: bytes, parts: Parts, forth: bool, rules: list[Rule], struck: list[dict[str, Any]]
    ) -> None:
        rule = None
        if rules and (forth or self.socket == "control"):
            header = header_of(parts)
            kind, name = str(header.get("t")), identity.decode(errors="replace")
            rule = next((r for r in rules if r.fits(self.link, self.socket, name, kind, len(parts))), None)
            if rule is not None:
                rule.count -= 1
                about = {"request": header.get("request", ""), "attempt": header.get("attempt", 0)}
                struck.append({"struck": rule.arm, "kind": kind, "sender": name, **about})
        self._flows.setdefault((identity, forth), Flow()).push(parts, time.monotonic(), rule)

    def send_due(self) -> None:
        now = time.monotonic()
        for (identity, forth), flow in list(self._flows.items()):
            for parts in flow.due(now):
                with suppress(zmq.Again):
                    if forth and identity in self.backs:
                        self.backs[identity].send_multipart(parts, zmq.DONTWAIT)
                    elif not forth:
                        self.front.send_multipart([identity, *parts], zmq.DONTWAIT)

    def forget_idle(self, alive: set[bytes]) -> None:
        for identity in self.backs.keys() - alive:
            self.backs.pop(identity).close()
            for forth in (True, False):
                self._flows.pop((identity, forth), None)

    def alive(self) -> set[bytes]:
        """Identities heard of lately. On the control socket they send heartbeats."""
        now = time.monotonic()
        return {identity for identity, at in self._heard_at.items() if now - at < FORGET_IDLE_S}


def _drain(socket: zmq.Socket[bytes]) -> Iterator[Parts]:
    for _ in range(256):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return


class Proxy:
    """All links, the rules in force, and the line to the harness."""

    def __init__(self, routes: dict[str, dict[str, list[str]]]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = {
            link: [Path(self._context, link, name, *ends) for name, ends in sockets.items()]
            for link, sockets in routes.items()
        }
        self._rules: list[Rule] = []
        self._pending = b""

    def run(self) -> None:
        """Until stdin ends."""
        print(json.dumps({"ready": True}), flush=True)
        while True:
            paths = [path for link in self._links.values() for path in link]
            poller = zmq.Poller()
            poller.register(0, zmq.POLLIN)
            for path in paths:
                for socket in path.sockets():
                    poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(POLL_MS))
            if 0 in ready and not self._take_orders():
                return
            struck: list[dict[str, Any]] = []
            for path in paths:
                path.take_in(self._rules, struck)
                path.send_due()
            for report in struck:
                print(json.dumps(report), flush=True)
            self._rules = [rule for rule in self._rules if rule.count > 0]
            for link in self._links.values():
                alive = set().union(*(path.alive() for path in link))
                for path in link:
                    path.forget_idle(alive)

    def _take_orders(self) -> bool:
        piece = os.read(0, 65_536)
        *lines, self._pending = (self._pending + piece).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "disarm" in order:
                self._rules = [rule for rule in self._rules if rule.arm != order["disarm"]]
            else:
                self._rules.append(Rule(**order))
        return bool(piece)


if __name__ == "__main__":
    Proxy(json.loads(sys.argv[1])).run()
