"""What the attacks of test_hostile.py need: a target, a gateway that means no good, and what strangers send."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from pdserve.transfer.channel import FrameCounts, Router
from pdserve.transfer.codec import SCHEMA_VERSION, encode, seal
from pdserve.transfer.messages import (
    Abort,
    Busy,
    Cancel,
    Credit,
    Failed,
    FirstTokens,
    GatewayHeartbeat,
    Gone,
    Handoff,
    Hello,
    Leaving,
    Message,
    PeerHeartbeat,
    Register,
    Registered,
    Reserve,
    Reserved,
    Slab,
    Tokens,
    Welcome,
    WorkerHeartbeat,
)
from pdserve.transfer.offers import RingOffer, RingSpan
from pdserve.transfer.sampling_params import SamplingParams
from tests.system.harness import Gateway, Launch, eventually
from tests.system.tiny_model import random_prompt

MIB = 1024 * 1024
HUGE = (1 << 48) - 1
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
PROMPTS = [random_prompt(seed, 90) for seed in range(4)]
MAX_TOKENS = 16
ATTACK_S = 1.2
NUM_ANSWERS = 3
GIVE_UP_S = 20.0


def ready(identity: bytes) -> bytes:
    """ZMTP's handshake of a DEALER, by hand."""
    fields = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = b"\x05READY" + b"".join(bytes([len(k)]) + k + struct.pack(">I", len(v)) + v for k, v in fields)
    return GREETING + b"\x04" + bytes([len(body)]) + body


def shake_hands(raw: socket.socket, identity: bytes) -> None:
    """Get past ZMTP's handshake, to where any frames can be sent."""
    handshake = ready(identity)
    raw.sendall(handshake[: len(GREETING)])
    raw.recv(len(GREETING), socket.MSG_WAITALL)
    raw.sendall(handshake[len(GREETING) :])
    raw.recv(4096)


def endpoint(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


class OtherGateway:
    """A second gateway of the workers, which speaks the protocol and means no good."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = Router(self.context, address, FrameCounts())
        self.identities: dict[str, str] = {}
        self.registers: dict[str, Register] = {}
        self.received: list[Message] = []
        self.to_send: deque[tuple[str, Message]] = deque()
        self.live: list[tuple[str, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beat_at, numbers = 0.0, itertools.count(1)
        while not self._stop.is_set():
            self.router.socket.poll(20)
            for received in self.router.receive():
                self.received.append(received.message)
                if isinstance(received.message, Register):
                    self.identities[received.message.worker] = received.sender
                    self.registers[received.message.worker] = received.message
                    self.router.send(received.sender, Registered("other#00000000", received.message.worker))
            while self.to_send:
                worker, message = self.to_send.popleft()
                self.router.send(self.identities[worker], message)
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + 0.2
                for identity in self.identities.values():
                    self.router.send(identity, GatewayHeartbeat(next(numbers), self.live))

    def worker(self, role: str) -> Register:
        return next(register for register in self.registers.values() if register.role == role)

    def tell(self, role: str, *messages: Message) -> None:
        self.to_send.extend((self.worker(role).worker, message) for message in messages)

    def requests(self, kind: type[Message]) -> set[str]:
        """The requests that messages of this kind were about."""
        return {message.request for message in list(self.received) if isinstance(message, kind)}  # type: ignore[attr-defined]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.context.destroy(linger=0)


@dataclass
class Target:
    """The system under attack: its gateway, its workers, and what it says when nobody disturbs it."""

    gateway: Gateway
    workers: list[Launch]
    other: OtherGateway
    golden: list[list[int]] = field(default_factory=list)

    @property
    def ports(self) -> dict[str, str]:
        decode = self.other.worker("decode")
        return {
            "gateway": self.gateway.client.get("/pools").json()["control_address"],
            "bulk": decode.bulk_address,
            "control": decode.peer_address,
        }

    def answer(self, number: int) -> list[int]:
        greedy = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        return self.gateway.client.complete(PROMPTS[number], **greedy).token_ids

    def dropped(self) -> float:
        return self.gateway.metric("pdserve_frames_dropped_total")

    def processes(self) -> set[int]:
        return {process.pid for launch in (self.gateway, *self.workers) for process in launch.processes()}

    @contextmanager
    def serving(self) -> Iterator[Callable[[], bool]]:
        """Real requests all the while, each with the right text; afterwards the same processes, and nothing held.

        Gives a function that says whether the attack has gone on for long enough: for a while, and for a few answers.
        """
        before, dropped = self.processes(), self.dropped()
        stop = threading.Event()
        answers: list[tuple[int, list[int]]] = []
        errors: list[BaseException] = []

        def ask() -> None:
            for number in itertools.cycle(range(len(PROMPTS))):
                if stop.is_set():
                    return
                try:
                    answers.append((number, self.answer(number)))
                except BaseException as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        started = time.monotonic()

        def enough() -> bool:
            elapsed_s = time.monotonic() - started
            return elapsed_s > ATTACK_S and (len(answers) >= NUM_ANSWERS or bool(errors) or elapsed_s > GIVE_UP_S)

        try:
            yield enough
        finally:
            stop.set()
            thread.join(60)
        assert errors == []
        assert len(answers) >= NUM_ANSWERS
        assert all(tokens == self.golden[number] for number, tokens in answers)
        assert self.processes() == before
        eventually(lambda: self.dropped() > dropped, 15, "what was sent is counted")
        assert [self.answer(number) for number in range(len(PROMPTS))] == self.golden
        self.gateway.assert_idle()


NOISE = [
    b"\x00" * 500,
    bytes(range(256)) * 40,
    random.Random(1).randbytes(20_000),
    GREETING[:13],
    GREETING,
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    pickle.dumps({"a": 1}),
    ready(b"x") + b"\x02" + b"\xff" * 8,
    ready(b"x") + b"\x02" + struct.pack(">Q", 1 << 62),
    ready(b"x") + b"\x04\xff" + b"\xff" * 255,
    ready(b"\xff\xfe") + b"\x00\x05hello",
    ready(b"") + b"\x00\x00" * 100,
]


def frames(layout: Any) -> list[list[bytes]]:
    """Messages of strangers, from nonsense to perfectly valid."""
    worker = "nobody#00000000"
    heartbeat = WorkerHeartbeat(HUGE, [("r", 1)] * 5000, True, HUGE, HUGE, HUGE, HUGE, HUGE, False, [], [])
    valid: list[Message] = [
        heartbeat,
        Tokens([("r", 1 << 20, 127, HUGE, 1 << 31, "stop")] * 1000),
        Reserved("r", 1, HUGE, HUGE, False, "", 1e7),
        FirstTokens("r", 1, 127, HUGE, [1 << 31] * 128, HUGE, 1e7, 1e7),
        Busy("r", 1, ""),
        Failed("r", 1, "x", "y" * 4096, False),
        Gone("r", 1),
        Leaving(worker),
        Hello(worker, layout, "zmq"),
        Hello(worker, layout, "shm", RingOffer(1, 0, 1 << 40, "0" * 32)),
        PeerHeartbeat(worker, [("r", 1)] * 5000),
        Handoff("r", 1, HUGE, [1 << 31] * 128, 1e7),
        Abort("r", 1, HUGE, "z"),
        Credit(HUGE),
        Cancel("r", 1),
        Welcome(worker, HUGE, "shm", ""),
    ]
    header = {"v": SCHEMA_VERSION, "t": "Credit"}
    broken: list[object] = [
        {**header, "consumed_bytes": -1},
        {**header, "consumed_bytes": 1 << 63},
        {**header, "consumed_bytes": float("nan")},
        {**header, "consumed_bytes": "1"},
        {**header, "consumed_bytes": 1, "more": 1},
        {**header, "v": SCHEMA_VERSION + 1},
        {"v": SCHEMA_VERSION, "t": "Nothing"},
        {"v": SCHEMA_VERSION, "t": ["Credit"]},
        [1, 2, 3],
        {1: {2: {3: None}}},
    ]
    nested = b"\x91" * 5000 + b"\xc0"
    promised = b"\xdd\xff\xff\xff\xff"  # an array of 2^32 - 1 elements, of which none comes
    return [
        *([encode(message)] for message in valid),
        *([seal(msgpack.packb(body))] for body in broken),
        [msgpack.packb({**header, "consumed_bytes": 1})],
        [pickle.dumps(os.getcwd)],
        [seal(nested)],
        [seal(promised)],
        [seal(b"\xc6\xff\xff\xff\xff")],
        [encode(valid[0])[:-1] + b"\0"],
        [b""],
        [b"a"] * 50,
        [encode(Slab("r", 1, 1, 0, 0, 1, 0))],
        [encode(Slab("r", 1, 1, 0, 0, 1, 0, RingSpan(HUGE, HUGE)))],
        [encode(Slab("r", 1, 1, 1023, 4_000_000, 4_000_000, (1 << 64) - 1)), b"x" * 1000],
        [encode(Slab("r", 1, 1, 0, 0, 1, 0)), b"x" * 4 * MIB],
        [b"x" * 4 * MIB],
    ]


@contextmanager
def stranger(context: zmq.Context[Any], address: str, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDTIMEO, 200)
        dealer.setsockopt(zmq.SNDHWM, 2000)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(address)
        yield dealer


def reserve(request: str, **change: Any) -> Reserve:
    fields: dict[str, Any] = {
        "request": request, "attempt": 1, "prompt": PROMPTS[0], "outputs": [[]], "finished": [False],
        "params": SamplingParams(MAX_TOKENS, seed=1), "prefill": "evil#00000000", "local_prefill": "never",
        "local_reason": "", "cache_salt": "", "priority": 0, **change,
    }  # fmt: skip
    return Reserve(**fields)
