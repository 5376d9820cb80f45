"""Real prefill and decode workers on threads, over real sockets, with a tiny model; the test is their gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from pdserve.decode.config import DecodeConfig
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.setup import Engine, EngineConfig
from pdserve.engine.worker_flags import WorkerConfig
from pdserve.prefill.config import PrefillConfig
from pdserve.prefill.worker import PrefillWorker
from pdserve.transfer.channel import FrameCounts, Received, Router
from pdserve.transfer.links import LinkMode
from pdserve.transfer.messages import (
    GatewayHeartbeat,
    Message,
    Peer,
    Peers,
    Prefill,
    Register,
    Registered,
    Reserve,
    Reserved,
    Tokens,
    WorkerHeartbeat,
)
from pdserve.transfer.reports import Link
from pdserve.transfer.sampling_params import SamplingParams
from tests.engine.tiny_models import build, load

WAIT_S = 40.0


def engine(num_blocks: int, block_size: int) -> Engine:
    model = load(build("llama"))
    return Engine(model, KVCache(model.layout, num_blocks, block_size), BlockPool(num_blocks, block_size))


class Rig:
    """One gateway socket, and whichever workers the test starts. `beat` keeps them believing in the gateway."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context: zmq.Context = zmq.Context()
        self.gateway = Router(self.context, f"ipc://{directory}/gw", FrameCounts())
        self.identity: dict[str, str] = {}  # worker id → socket identity
        self.registered: dict[str, Register] = {}
        self.heartbeats: dict[str, WorkerHeartbeat] = {}
        self.live: set[tuple[str, int]] = set()
        self.received: list[tuple[str, Message]] = []
        self.first_index: dict[tuple[str, int], int] = {}  # of attempts that go on from tokens they were given
        self.accepting = True
        self.knocks: set[str] = set()  # socket identities that asked in vain
        self.engine = engine  # (number of blocks, block size) → what the next worker runs
        self.workers: list[tuple[DecodeWorker | PrefillWorker, threading.Thread]] = []
        self._seq = 0
        self._beat_at = 0.0

    # --- workers ---------------------------------------------------------------------------------------------

    def _flags(
        self, name: str, chunk_tokens: int, death_bound_s: float, link: LinkMode, ring_bytes: int = 1 << 20
    ) -> WorkerConfig:
        return WorkerConfig(
            name, (self.gateway.address,), EngineConfig("tiny", "tiny"), chunk_tokens, death_bound_s,
            check_invariants=True, link=link, ring_bytes=ring_bytes,
        )  # fmt: skip

    def _start(self, worker: DecodeWorker | PrefillWorker) -> None:
        thread = threading.Thread(target=worker.run, daemon=True)
        self.workers.append((worker, thread))
        thread.start()

    def start_decode(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        deadline_s: float = 30.0,
        death_bound_s: float = 5.0,
        link: LinkMode = "auto",
        decode_ring_bytes: int = 1 << 20,
        **change: object,
    ) -> str:
        name = f"decode-{len(self.workers)}"
        config = DecodeConfig(
            self._flags(name, 16, death_bound_s, link, decode_ring_bytes),
            f"ipc://{self.directory}/{name}.b", f"ipc://{self.directory}/{name}.c",
            transfer_deadline_s=deadline_s, **change,
        )  # fmt: skip
        self._start(DecodeWorker(config, self.engine(num_blocks, block_size), "here"))
        return self.wait_registered(name)

    def start_prefill(
        self,
        num_blocks: int = 64,
        block_size: int = 8,
        chunk_tokens: int = 16,
        death_bound_s: float = 5.0,
        link: LinkMode = "auto",
        ring_bytes: int = 1 << 20,
    ) -> str:
        name = f"prefill-{len(self.workers)}"
        config = PrefillConfig(self._flags(name, chunk_tokens, death_bound_s, link, ring_bytes))
        self._start(PrefillWorker(config, self.engine(num_blocks, block_size), "here"))
        return self.wait_registered(name)

    def wait_registered(self, name: str) -> str:
        """Until it has registered, and sent a heartbeat."""
        self.until(lambda: any(w.startswith(name + "#") for w in self.heartbeats), f"{name} registers")
        return next(w for w in self.registered if w.startswith(name + "#"))

    def pair(self, **change: object) -> tuple[str, str]:
        """A linked (prefill, decode) pair."""
        for_prefill = {name: change.pop(name) for name in ("chunk_tokens", "ring_bytes") if name in change}
        if "prefill_link" in change:
            for_prefill["link"] = change.pop("prefill_link")
        decode = self.start_decode(**change)
        prefill = self.start_prefill(**for_prefill)
        self.introduce(prefill, decode)
        return prefill, decode

    def introduce(self, prefill: str, *decodes: str) -> None:
        peers = [
            Peer(register.worker, "here", register.bulk_address, register.peer_address, register.links, register.device)
            for register in (self.registered[decode] for decode in decodes)
        ]
        self.send(prefill, Peers(peers))
        self.until(
            lambda: {x.worker for x in self.links(prefill) if x.state == "linked"} >= set(decodes), "the pair is linked"
        )

    def links(self, prefill: str) -> list[Link]:
        return self.heartbeats[prefill].links if prefill in self.heartbeats else []

    @contextmanager
    def held_up(self, name: str) -> Iterator[None]:
        """While the block lasts, a step of this worker does not come to its end, as if it took seconds: so what is
        said meanwhile comes in the middle of it, however fast anybody is."""
        worker = next(worker for worker, _ in self.workers if worker._members.worker == name)
        if isinstance(worker, DecodeWorker):
            runner, look = worker._stepper._runner, worker._between_layers
        else:
            runner, look = worker._runner, worker._look_up
        on_layer, over = runner.on_layer, threading.Event()

        def linger(layer: int) -> None:
            on_layer(layer)
            until = time.monotonic() + WAIT_S
            while not over.wait(0.005) and time.monotonic() < until:
                look()  # raises when nobody wants the step any more

        runner.on_layer = linger
        try:
            yield
        finally:
            runner.on_layer = on_layer
            over.set()

    # --- the gateway's end -----------------------------------------------------------------------------------

    def send(self, worker: str, message: Message) -> None:
        assert self.gateway.send(self.identity[worker], message)

    def pump(self) -> None:
        self.gateway.socket.poll(10)
        for received in self.gateway.receive():
            self.gateway.trust(received.connection)  # as a gateway does: strangers are heard out seldom
            self._take(received)
        if time.monotonic() >= self._beat_at and self.accepting:
            self._beat_at = time.monotonic() + 0.1
            self._seq += 1
            for identity in self.identity.values():
                self.gateway.send(identity, GatewayHeartbeat(self._seq, sorted(self.live)))

    def _take(self, received: Received) -> None:
        worker = received.sender.rpartition("/")[0]
        match received.message:
            case Register() if not self.accepting:
                self.knocks.add(received.sender)
            case Register() as register:
                self.registered[worker] = register
                self.identity[worker] = received.sender
                self.gateway.send(received.sender, Registered("gateway#00000000", worker))
            case WorkerHeartbeat() as heartbeat:
                self.heartbeats[worker] = heartbeat
            case message:
                self.received.append((worker, message))

    def until(self, predicate: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not predicate():
            for worker, thread in self.workers:
                assert thread.is_alive(), f"{worker} died"
            assert time.monotonic() < deadline, f"timed out waiting until {what}; received {self.received[-5:]}"
            self.pump()

    def wait_for(self, kind: type[Message], request: str = "", attempt: int = 0, timeout_s: float = WAIT_S) -> Message:
        """The first message of a kind (about a request, about an attempt) that has come or comes now."""

        def matching() -> list[Message]:
            return [
                m for _, m in self.received
                if isinstance(m, kind)
                and (not request or vars(m).get("request") == request)
                and (not attempt or vars(m).get("attempt") == attempt)
            ]  # fmt: skip

        self.until(lambda: bool(matching()), f"{kind.__name__} for {request or 'anybody'} comes", timeout_s)
        return matching()[0]

    def tokens(self, request: str, attempt: int = 1) -> dict[int, list[int]]:
        """Tokens per choice as decode has sent them so far."""
        out: dict[int, list[int]] = {}
        for _, message in self.received:
            if isinstance(message, Tokens):
                for name, number, choice, index, token, _ in message.items:
                    if (name, number) == (request, attempt):
                        assert index - len(out.setdefault(choice, [])) == self.first_index.get((name, number), 0)
                        out[choice].append(token)
        return out

    def finished(self, request: str, attempt: int = 1) -> set[int]:
        return {
            item[2]
            for _, m in self.received
            if isinstance(m, Tokens)
            for item in m.items
            if item[:2] == (request, attempt) and item[5]
        }

    def held(self, worker: str) -> int:
        """Held blocks as of the worker's next heartbeat."""
        self.heartbeats.pop(worker, None)
        self.until(lambda: worker in self.heartbeats, "a heartbeat comes")
        return self.heartbeats[worker].held_blocks

    def metric(self, worker: str, sample: str, **labels: str) -> float:
        """Sum of a sample over all that bear these labels, from a fresh heartbeat."""
        self.held(worker)
        samples = [s for family in self.heartbeats[worker].metrics for s in family.samples if s.name == sample]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def close(self) -> None:
        for worker, _ in self.workers:
            worker.stop()
        for _, thread in self.workers:
            thread.join(10)
            assert not thread.is_alive()
        self.gateway.close()
        self.context.destroy(linger=0)


def reserve_message(request: str, prompt: list[int], prefill: str = "", max_tokens: int = 10, **change) -> Reserve:
    n = change.pop("n", 1)
    fields = {
        "request": request, "attempt": 1, "prompt": prompt, "outputs": [[]] * n, "finished": [False] * n,
        "params": SamplingParams(max_tokens=max_tokens, seed=5, temperature=0.0, ignore_eos=True),
        "prefill": prefill, "local_prefill": "never" if prefill else "always", "local_reason": "no_prefill",
        "cache_salt": "", "priority": 0,
    }  # fmt: skip
    return Reserve(**{**fields, **change})


def prefill_message(reserve: Reserve, reserved: Reserved, decode: str) -> Prefill:
    unfinished = [c for c, finished in enumerate(reserve.finished) if not finished]
    choice, n = unfinished[0], len(unfinished)
    output = reserve.outputs[choice]
    return Prefill(
        reserve.request, reserve.attempt, reserve.prompt, output, choice, n, reserve.params, decode,
        reserved.reservation, reserved.held_tokens, reserved.deadline_s, reserve.cache_salt, reserve.priority,
    )  # fmt: skip
