"""Decode workers that answer from memory: the real protocol, no model. What `bench gateway` puts behind a gateway.

Run as a program: `python -m pdserve.bench.memory_worker ADDRESS FINGERPRINT NUM_WORKERS STEP_S TIMES_FILE`. Each
worker takes its steps STEP_S apart, the workers one after the other; a step is one message with a token for every
sequence. At SIGTERM the times at which tokens were sent go to TIMES_FILE, as JSON: {number of the request: [monotonic
seconds]}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from ..transfer.channel import Dealer, FrameCounts
from ..transfer.layout import KVLayout, LayerShape
from ..transfer.messages import (
    Cancel,
    Finish,
    GatewayHeartbeat,
    Gone,
    Message,
    Register,
    Registered,
    Reserve,
    Reserved,
    Tokens,
    WorkerHeartbeat,
)

HEARTBEAT_S = 0.25
REGISTER_EVERY_S = 0.5
MAX_WAIT_MS = 50
FIRST_TOKEN, NUM_TOKENS = 1000, 7000  # ids of ordinary pieces of text in most vocabularies
PROMPT_BASE = 200  # every vocabulary has that many
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 1 << 20, 16, 1 << 20
DEADLINE_S = 60.0
MODEL = "m"


def prompt_of(number: int) -> list[int]:
    """Two tokens that say which request it is."""
    return [number // PROMPT_BASE, number % PROMPT_BASE]


def number_of(prompt: list[int]) -> int:
    return prompt[0] * PROMPT_BASE + prompt[1]


@dataclass
class Job:
    """A sequence that gets a token in every step."""

    number: int
    max_tokens: int
    next_index: int
    times: list[float]


@dataclass
class MemoryWorker:
    """One decode worker of that name."""

    context: zmq.Context[Any]
    address: str
    fingerprint: str  # of the model's files: the gateway compares it with its own
    name: str
    times: dict[int, list[float]]
    jobs: dict[tuple[str, int], Job] = field(default_factory=dict)
    registered: bool = False
    seen_seq: int = 0
    next_register: float = 0.0
    next_beat: float = 0.0

    def __post_init__(self) -> None:
        self.worker = f"{self.name}#{os.getpid() & 0xFFFFFFFF:08x}"
        self.dealer = Dealer(self.context, self.address, f"{self.worker}/1", FrameCounts())

    def receive(self, now: float) -> None:
        """Take what has come, and say what is due."""
        for received in self.dealer.receive():
            self._handle(received.message)
        if not self.registered and now >= self.next_register:
            self.next_register = now + REGISTER_EVERY_S
            self.dealer.send(self._registration())
        elif self.registered and now >= self.next_beat:
            self.next_beat = now + HEARTBEAT_S
            self.dealer.send(self._heartbeat())
        self.dealer.flush()

    def _handle(self, message: Message) -> None:
        match message:
            case Registered():
                self.registered = True
            case GatewayHeartbeat():
                self.seen_seq = message.seq
            case Reserve():
                key = message.request, message.attempt
                number = number_of(message.prompt)
                times = self.times.setdefault(number, [])
                self.jobs[key] = Job(number, message.params.max_tokens, len(message.outputs[0]), times)
                self.dealer.send(Reserved(*key, 1, 0, True, message.local_reason, DEADLINE_S))
            case Cancel() | Gone():
                self.jobs.pop((message.request, message.attempt), None)

    def step(self) -> None:
        """A token for every sequence."""
        items: list[tuple[str, int, int, int, int, Finish]] = []
        now = time.monotonic()
        for key, job in list(self.jobs.items()):
            last = job.next_index + 1 >= job.max_tokens
            token = FIRST_TOKEN + (job.number + 31 * job.next_index) % NUM_TOKENS
            items.append((*key, 0, job.next_index, token, "length" if last else ""))
            job.times.append(now)
            job.next_index += 1
            if last:
                del self.jobs[key]
        if items:
            self.dealer.send(Tokens(items))

    def _registration(self) -> Register:
        return Register(
            worker=self.worker, role="decode", model=MODEL,
            layout=KVLayout(self.fingerprint, "float32", (LayerShape(1, 4, 4),)), host="memory",
            bulk_address="ipc:///nowhere/bulk", peer_address="ipc:///nowhere/control", links=["zmq"],
            block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, max_sequences=1024,
            pid=os.getpid(),
        )  # fmt: skip

    def _heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            seen_seq=self.seen_seq, live=sorted(self.jobs), ready=True, free_blocks=NUM_BLOCKS, held_blocks=0,
            running=len(self.jobs), waiting=0, queued_tokens=0, draining=False, links=[], metrics=[],
        )  # fmt: skip


def serve(workers: list[MemoryWorker], step_s: float, going_on: Iterator[bool]) -> None:
    """Step the workers in turn, each every `step_s`, while `going_on` says so."""
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.dealer.socket, zmq.POLLIN)
    due = time.monotonic()
    turn = 0
    while next(going_on):
        now = time.monotonic()
        for worker in workers:
            worker.receive(now)
        while now >= due:
            workers[turn % len(workers)].step()
            turn += 1
            due += step_s / len(workers)
            now = time.monotonic()
        poller.poll(min(MAX_WAIT_MS, max(0, round((due - now) * 1000))))


def main(arguments: list[str]) -> None:
    address, fingerprint, num_workers, step_s, times_file = arguments
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends it
    context: zmq.Context[Any] = zmq.Context()
    times: dict[int, list[float]] = {}
    workers = [MemoryWorker(context, address, fingerprint, f"memory-{n}", times) for n in range(int(num_workers))]
    serve(workers, float(step_s), iter(lambda: not stopped, None))
    Path(times_file).write_text(json.dumps(times), encoding="utf-8")
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1:])
