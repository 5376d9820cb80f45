"""The two processes of `bench transfer`: the sending and the receiving end of the pools, without a model.

    sender    PeerLink and Outgoing gather the layers of a chunk out of paged blocks, as a prefill worker does between
              the layers of its step: copied and summed in one pass, and a header
    receiver  Intake and Receiver take the slabs in, and copy them into paged blocks, summing them on the way, as a
              decode worker

They share a pipe for what is no part of the transfer: addresses at the start, which prompts are to be expected, and a
word after each prompt.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import zmq

from ..decode.intake import Intake, worker_of
from ..engine.kv_cache import KVCache
from ..transfer.channel import FrameCounts
from ..transfer.io_threads import hasten_io_threads
from ..transfer.layout import KVLayout, LayerShape
from ..transfer.messages import Abort, Handoff, Peer, Slab
from ..transfer.receiver import Receiver
from ..transfer.ring import DEFAULT_RING_BYTES
from ..transfer.sender import LinkOptions, LinkState, Outgoing, PeerLink
from ..transfer.slab import store_slab
from .errors import BenchError

LinkName = Literal["shm", "zmq ipc", "zmq tcp"]
LINKS: tuple[LinkName, ...] = ("shm", "zmq ipc", "zmq tcp")

BLOCK_SIZE = 16
SENDER, RECEIVER = "prefill-0#00000001", "decode-0#00000002"
RESERVATION = 1
LINK_TIMEOUT_S = 20.0
WORD_TIMEOUT_S = 60.0  # for a prompt to arrive, or a process to answer
POLL_MS = 50
TAKE_BYTES = 64 << 20
MIN_PROMPTS = 5
EXPECTED_AT_ONCE = 64
TURN_EVERY_S = 0.004  # as a prefill worker does


@dataclass(frozen=True)
class Job:
    """One link, one kind of prompt. `cache_bytes`: of KV on each side, far more than a last-level cache has."""

    link: LinkName
    layout: KVLayout
    prompt_tokens: int
    chunk_tokens: int
    cache_bytes: int = 288 << 20

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_tokens * self.layout.bytes_per_token


@dataclass(frozen=True)
class Moved:
    """What was moved, and what it took. Processor seconds are each end's own, its ZeroMQ thread included."""

    num_bytes: int
    num_prompts: int
    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    by_frame: int  # slabs of a shm link that found no room in the ring
    ship_s: float  # the sender's wall time in `ship`, which a prefill step waits for; of one prompt, median
    tail_s: float  # from the last `ship` of a prompt until decode has all of it, median


def layout_of_model(directory: Path) -> KVLayout:
    """From its config.json, without loading it. Raises BenchError where that does not say."""
    try:
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return layout_of(config["num_hidden_layers"], config.get("num_key_value_heads") or heads, head_dim, "float32")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{directory} does not say its KV layout ({error!r}); give --layout") from error


def layout_of(layers: int, kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
    return KVLayout("bench", dtype, tuple(LayerShape(kv_heads, head_dim, head_dim) for _ in range(layers)))


def most_in_flight(link: LinkName, prompt_bytes: int) -> int:
    """Prompts under way at once: what fits three quarters of a ring, so that slabs go through it and not beside it."""
    return max(1, min(8, DEFAULT_RING_BYTES * 3 // 4 // prompt_bytes)) if link == "shm" else 2


def _cache(job: Job) -> tuple[KVCache, Iterator[list[int]]]:
    """KV, all of it written, and block tables for one prompt after another that walk through it."""
    per_prompt = -(-job.prompt_tokens // BLOCK_SIZE)
    num_tables = max(2, job.cache_bytes // job.prompt_bytes)
    cache = KVCache(job.layout, num_tables * per_prompt, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1)
    order = torch.randperm(cache.num_blocks).tolist()
    tables = [order[i * per_prompt : (i + 1) * per_prompt] for i in range(num_tables)]
    return cache, itertools.cycle(tables)


def _prepare(core: int) -> None:
    torch.set_num_threads(1)
    with suppress(OSError):  # it has been taken from us meanwhile
        os.sched_setaffinity(0, {core})


def _next_word(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):  # the sender has died
        return "stop"


def receive(pipe: Connection, job: Job, directory: str, core: int) -> None:
    """The receiving process: says where it listens, then a word for every prompt that is here whole; ends when told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the sender, which tells this end
    _prepare(core)
    cache, tables = _cache(job)
    context, counts = zmq.Context(), FrameCounts()
    base = "tcp://127.0.0.1:0" if job.link == "zmq tcp" else f"ipc://{directory}/{job.link.replace(' ', '-')}"
    suffixes = ("", "") if job.link == "zmq tcp" else (".bulk", ".ctl")
    mode: Literal["shm", "zmq"] = "shm" if job.link == "shm" else "zmq"
    intake = Intake(context, base + suffixes[0], base + suffixes[1], job.layout, counts, mode=mode)
    receiver = Receiver(job.layout)
    poller = zmq.Poller()
    for socket in intake.sockets:
        poller.register(socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    pipe.send(intake.addresses)
    blocks: dict[str, list[int]] = {}
    by_frame = 0
    done = False
    while not done:
        poller.poll(POLL_MS)
        while pipe.poll():
            match _next_word(pipe):
                case ("expect", list(names)):
                    hasten_io_threads()  # they have linked the two ends by now
                    for name in names:
                        receiver.expect(name, 1, RESERVATION, SENDER, 0, job.prompt_tokens)
                        blocks[name] = next(tables)
                    pipe.send("expecting")
                case "used":
                    pipe.send((time.process_time(), by_frame, dict(counts.dropped)))
                case _:
                    done = True
        for _ in intake.poll_control(RECEIVER):
            pass
        whole: list[tuple[str, float]] = []
        for received in intake.poll_bulk(TAKE_BYTES):
            message = received.message
            assert isinstance(message, Slab | Handoff | Abort)
            entry = None if isinstance(message, Abort) else receiver.find(message, worker_of(received.sender))
            assert entry is not None, f"nobody waits for {message}"
            if isinstance(message, Slab):
                assert received.payload is not None
                receiver.check(entry, message, received.payload)
                store_slab(cache, message, blocks[message.request], received.payload)
                receiver.taken(entry, message, received.payload.nbytes)
                by_frame += job.link == "shm" and message.span is None
            elif isinstance(message, Handoff):
                receiver.complete(entry)
                del blocks[message.request]
                whole.append((message.request, time.monotonic()))
        intake.send_credits()
        for word in whole:
            pipe.send(word)
    intake.close()
    context.destroy(linger=0)


class Sender:
    """The sending end, in the calling process."""

    def __init__(self, pipe: Connection, job: Job) -> None:
        self._pipe = pipe
        self._job = job
        self._cache, self._tables = _cache(job)
        self._context = zmq.Context()
        bulk, control = self._word()
        offered = ["shm"] if job.link == "shm" else ["zmq"]
        peer = Peer(RECEIVER, "here", bulk, control, offered)
        options = LinkOptions("shm" if job.link == "shm" else "zmq", "here", ring_bytes=DEFAULT_RING_BYTES)
        self._link = PeerLink(self._context, peer, SENDER, 1, job.layout, FrameCounts(), options)
        self._expected: deque[str] = deque()  # prompts that the receiver waits for
        self._under_way: dict[str, float] = {}  # prompt → when its last slab was shipped
        self._numbers = itertools.count()
        self._turned_at = 0.0
        self._ship_s: list[float] = []
        self._tail_s: list[float] = []

    def _word(self) -> Any:
        """What the receiver says next. Raises BenchError when it says nothing, or has died."""
        try:
            if self._pipe.poll(WORD_TIMEOUT_S):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise BenchError(f"the receiving process died ({type(error).__name__})") from error
        raise BenchError(f"{self._job.link}: nothing arrived within {WORD_TIMEOUT_S:.0f} s")

    def connect(self) -> None:
        """Raises BenchError unless the link is made, as asked for."""
        deadline = time.monotonic() + LINK_TIMEOUT_S
        poller = zmq.Poller()
        for socket in self._link.sockets:
            poller.register(socket, zmq.POLLIN)
        while self._link.state is LinkState.CONNECTING and time.monotonic() < deadline:
            self._turn()
            poller.poll(POLL_MS)
        if self._link.state is not LinkState.LINKED:
            raise BenchError(f"{self._job.link} cannot be used here: {self._link.detail or 'no answer'}")
        hasten_io_threads()

    def _turn(self) -> None:
        """As between two layers of a step: from time to time, what the peer has said, and what is due."""
        if (now := time.monotonic()) < self._turned_at + TURN_EVERY_S:
            return
        self._turned_at = now
        for _ in self._link.poll():
            pass
        self._link.tick([])

    def run(self, in_flight: int, seconds: float, min_prompts: int) -> Moved:
        """Prompts, so many under way at once, until the time is over. Raises BenchError."""
        job = self._job
        self._send_prompt()
        self._settle(0)
        self._ship_s.clear()
        self._tail_s.clear()
        cpu_s, (receiver_cpu_s, frames, _) = time.process_time(), self._ask("used")
        started = time.monotonic()
        number = 0
        while number < min_prompts or time.monotonic() - started < seconds:
            self._settle(in_flight - 1)
            self._send_prompt()
            number += 1
        self._settle(0)
        wall_s = time.monotonic() - started
        cpu_s = time.process_time() - cpu_s
        receiver_end_s, frames_end, dropped = self._ask("used")
        if dropped:
            raise BenchError(f"{job.link}: frames were dropped: {dropped}")
        return Moved(
            num_bytes=number * job.prompt_bytes,
            num_prompts=number,
            wall_s=wall_s,
            sender_cpu_s=cpu_s,
            receiver_cpu_s=receiver_end_s - receiver_cpu_s,
            by_frame=frames_end - frames,
            ship_s=sorted(self._ship_s)[number // 2],
            tail_s=sorted(self._tail_s)[number // 2],
        )

    def _ask(self, what: object) -> Any:
        """Only while nothing is under way: else its answer would be mistaken."""
        self._pipe.send(what)
        return self._word()

    def _next_expected(self) -> str:
        """A prompt that the receiver waits for. It is told of many at a time."""
        if not self._expected:
            self._expected.extend(f"prompt-{next(self._numbers)}" for _ in range(EXPECTED_AT_ONCE))
            self._pipe.send(("expect", list(self._expected)))
            while (word := self._word()) != "expecting":
                self._arrived(word)
        return self._expected.popleft()

    def _send_prompt(self) -> None:
        job, name = self._job, self._next_expected()
        outgoing = Outgoing(name, 1, RESERVATION, 0, self._link, job.layout)
        table = next(self._tables)
        ship_s = 0.0
        for first in range(0, job.prompt_tokens, job.chunk_tokens):
            up_to = min(first + job.chunk_tokens, job.prompt_tokens)
            for layer in range(job.layout.num_layers):
                started = time.perf_counter()
                outgoing.ship(self._cache, layer, table, up_to)
                ship_s += time.perf_counter() - started
                self._turn()
        self._under_way[name] = time.monotonic()
        outgoing.hand_off([1], [])
        self._ship_s.append(ship_s)

    def _arrived(self, word: tuple[str, float]) -> None:
        name, at = word
        self._tail_s.append(max(0.0, at - self._under_way.pop(name)))  # one clock for all processes of a machine

    def _settle(self, at_most: int) -> None:
        """Wait until no more than that many prompts are under way."""
        deadline = time.monotonic() + WORD_TIMEOUT_S
        while len(self._under_way) > at_most:
            self._turn()  # what the socket would not take at once goes out now
            try:
                if self._pipe.poll(POLL_MS / 1000 if self._link.drained else 0.0):
                    self._arrived(self._pipe.recv())
            except (EOFError, OSError) as error:
                raise BenchError(f"the receiving process died ({type(error).__name__})") from error
            if time.monotonic() > deadline:
                raise BenchError(f"{self._job.link}: nothing arrived within {WORD_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        with suppress(OSError):  # the other end has died
            self._pipe.send("stop")
        self._link.close()
        self._context.destroy(linger=0)


@contextmanager
def receiving_process(job: Job, directory: str, core: int) -> Iterator[Connection]:
    """A receiver in a fresh process; none is left when the block is."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=receive, args=(theirs, job, directory, core), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(timeout=5.0)
        if process.is_alive():
            process.kill()
            process.join()


def move(job: Job, directory: str, cores: tuple[int, int], seconds: float) -> tuple[Moved, Moved]:
    """With as many prompts under way as the link is meant for, and with one at a time; a core for each end.

    Raises BenchError.
    """
    _prepare(cores[0])
    with receiving_process(job, directory, cores[1]) as pipe:
        sender = Sender(pipe, job)
        try:
            sender.connect()
            many = most_in_flight(job.link, job.prompt_bytes)
            return sender.run(many, seconds, MIN_PROMPTS), sender.run(1, seconds / 3, MIN_PROMPTS)
        finally:
            sender.close()
