"""Stands where the gateway would, for two workers: without HTTP, a tokenizer, or any choice to make."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import zmq

from ..transfer.channel import FrameCounts, Received, Router
from ..transfer.messages import (
    Busy,
    Failed,
    FirstTokens,
    GatewayHeartbeat,
    Message,
    Peer,
    Peers,
    Prefill,
    Register,
    Registered,
    RegistrationDenied,
    Reserve,
    Reserved,
    Tokens,
    WorkerHeartbeat,
)
from ..transfer.sampling_params import SamplingParams

BEAT_EVERY_S = 0.2
WAIT_MS = 2
STOP_TIMEOUT_S = 20.0

FLAGS = ("--log-level", "warning", "--drain-timeout-s", "0.2", "--exit-with-parent", str(os.getpid()))


class DriverError(Exception):
    """A worker died, refused, or did not answer in time."""


@dataclass
class Told:
    """What has come back of a request, and when: seconds of `time.perf_counter`."""

    prompt: list[int]
    max_tokens: int
    sent_at: float = 0.0  # to prefill
    first_at: float = 0.0  # FirstTokens came
    tokens: list[int] = field(default_factory=list)
    token_at: list[float] = field(default_factory=list)
    done: bool = False


class Driver:
    """One prefill and one decode worker, each a process of its own. Use as a context manager."""

    def __init__(self, model: Path, flags: Sequence[str], ready_timeout_s: float) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pdserve-check-")
        root = Path(self._directory.name)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = Router(self._context, f"ipc://{root}/gateway", FrameCounts())
        self._processes = {
            role: self._start(role, root, ["--model", str(model), "--gateway", self._router.address, *flags])
            for role in ("prefill", "decode")
        }
        self._ready_timeout_s = ready_timeout_s
        self._registered: dict[str, Register] = {}  # by role
        self._identities: dict[str, str] = {}  # by role
        self.heartbeats: dict[str, WorkerHeartbeat] = {}  # by role
        self._told: dict[str, Told] = {}
        self._reserved: dict[str, Reserved] = {}
        self._beat_at, self._beats = 0.0, 0

    def _start(self, role: str, root: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"pdserve.{role}", "--name", f"{role}-0", "--served-model-name", "random"]
        if role == "decode":
            command += ["--listen", f"ipc://{root}/decode"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen([*command, *arguments, *FLAGS], env=environment)

    def __enter__(self) -> Driver:
        try:
            self._until(lambda: len(self._registered) == 2, "both workers have registered", self._ready_timeout_s)
            decode = self._registered["decode"]
            peer = Peer(decode.worker, decode.host, decode.bulk_address, decode.peer_address, decode.links)
            self._send("prefill", Peers([peer]))
            self._until(self._is_linked, "the workers are linked", self._ready_timeout_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._router.close()
        self._context.destroy(linger=0)
        self._directory.cleanup()

    def _is_linked(self) -> bool:
        links = self.heartbeats["prefill"].links if "prefill" in self.heartbeats else []
        if refused := [link.detail for link in links if link.state == "refused"]:
            raise DriverError(f"the workers do not link: {refused[0]}")
        return any(link.state == "linked" for link in links)

    @property
    def link(self) -> str:
        """Of the pair, as the prefill worker names it."""
        return self.heartbeats["prefill"].links[0].link

    def held_blocks(self, timeout_s: float = 10.0) -> int:
        """Of both workers when everything has ended: 0, unless the time is over."""
        deadline = time.perf_counter() + timeout_s
        held = -1
        while held and time.perf_counter() < deadline:
            self.heartbeats.clear()
            self._until(lambda: len(self.heartbeats) == 2, "heartbeats come", timeout_s)
            held = sum(heartbeat.held_blocks for heartbeat in self.heartbeats.values())
        return held

    # --- requests --------------------------------------------------------------------------------------------

    def run(self, prompts: Sequence[list[int]], max_tokens: int, timeout_s: float) -> list[Told]:
        """Greedy text of all of them, computed together; every prompt by the prefill worker."""
        names = [f"r{len(self._told) + i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._told[name] = Told(prompt, max_tokens)
            self._send("decode", self._reserve(name))
        mine = [self._told[name] for name in names]
        self._until(lambda: all(told.done for told in mine), "all requests have finished", timeout_s)
        return mine

    def _reserve(self, name: str) -> Reserve:
        told = self._told[name]
        return Reserve(
            request=name, attempt=1, prompt=told.prompt, outputs=[[]], finished=[False],
            params=SamplingParams(max_tokens=told.max_tokens, seed=0, temperature=0.0, ignore_eos=True),
            prefill=self._registered["prefill"].worker, local_prefill="never", local_reason="", cache_salt=name,
            priority=0,
        )  # fmt: skip

    def _prefill(self, reserved: Reserved) -> None:
        reserve = self._reserve(reserved.request)
        self._told[reserved.request].sent_at = time.perf_counter()
        message = Prefill(
            request=reserved.request, attempt=1, prompt=reserve.prompt, output=[], choice=0, num_choices=1,
            params=reserve.params, decode=self._registered["decode"].worker, reservation=reserved.reservation,
            held_tokens=reserved.held_tokens, deadline_s=reserved.deadline_s, cache_salt=reserve.cache_salt, priority=0,
        )  # fmt: skip
        self._send("prefill", message)

    def _send(self, role: str, message: Message) -> None:
        if not self._router.send(self._identities[role], message):
            raise DriverError(f"the {role} worker takes no messages")

    # --- what comes back -------------------------------------------------------------------------------------

    def _until(self, predicate: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.perf_counter() + timeout_s
        while not predicate():
            for role, process in self._processes.items():
                if process.poll() is not None:
                    raise DriverError(f"the {role} worker ended with exit code {process.returncode}")
            if time.perf_counter() > deadline:
                raise DriverError(f"timed out after {timeout_s:g} s waiting until {what}")
            self._router.socket.poll(WAIT_MS)
            for received in self._router.receive():
                self._take(received)
            self._beat()

    def _beat(self) -> None:
        if time.perf_counter() >= self._beat_at:
            self._beat_at = time.perf_counter() + BEAT_EVERY_S
            self._beats += 1
            live = sorted((name, 1) for name, told in self._told.items() if not told.done)
            for identity in self._identities.values():
                self._router.send(identity, GatewayHeartbeat(self._beats, live))

    def _take(self, received: Received) -> None:
        now = time.perf_counter()
        match received.message:
            case Register(worker=worker, role=role) as register:
                self._registered[role], self._identities[role] = register, received.sender
                self._router.send(received.sender, Registered("gateway#00000000", worker))
            case WorkerHeartbeat() as heartbeat:
                mine = [role for role, identity in self._identities.items() if identity == received.sender]
                self.heartbeats |= dict.fromkeys(mine, heartbeat)
            case Reserved() as reserved:
                self._prefill(reserved)
            case FirstTokens(request=request):
                self._told[request].first_at = now
            case Tokens(items=items):
                for request, _, _, index, token, finish in items:
                    told = self._told[request]
                    if index != len(told.tokens):
                        raise DriverError(f"{request}: token {index} came where {len(told.tokens)} was due")
                    told.tokens.append(token)
                    told.token_at.append(now)
                    told.done = bool(finish)
            case Failed() | Busy() | RegistrationDenied() as refusal:
                raise DriverError(f"{refusal}")
            case message:
                raise DriverError(f"unexpected: {type(message).__name__}")
