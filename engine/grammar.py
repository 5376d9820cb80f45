"""Grammars as a worker sees them: wanted, compiled, and a mask of allowed tokens for every step.

The work is done by `grammar_process.py`, in a process that is started when the first grammar comes and killed when it
takes too long: nothing a client wrote can hold the worker's loop up. A choice's automaton is no state of the request:
it follows from the tokens that are out, and is told them again by whoever takes the request over.

1. `want` a grammar for an attempt, and again after every `poll`, until it says that it is compiled.
2. `ask` for the masks of the rows that will be sampled; they are computed while the model runs. `collect` them.
3. `forget` the attempt. `take_failures` says which attempts cannot go on, and why.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ..transfer.sampling_params import Grammar
from .grammar_wire import Frames, frame

log = logging.getLogger(__name__)

BAD_GRAMMAR = "bad_grammar"  # of `Failed`: the client's fault
GRAMMAR_DIED = "grammar_died"  # of `Failed`: the process died, maybe of this request's grammar
GRAMMAR_LOST = "grammar_lost"  # of `Failed`: nothing is wrong with this request

MASK_CPU_S = 1.0  # of the grammar process, for one row
TOLD_CPU_S = 0.001  # more, for every token that the row's automaton is told
SLOW_CPU_S = 2.0  # of the process, for all of one row's masks, above the 10 ms that each token may take
MASK_WALL_S = 20.0  # the same, on a machine that gives it no time
COMPILE_CPU_S = 5
MAX_COMPILING = 64
MAX_COMPILED = 512
MAX_COMPILED_BYTES = 256 * 1024 * 1024
MAX_TRIES = 3  # of compiling, when the process dies meanwhile
PUMP_S = 0.02

Key = tuple[str, int]  # (request id, attempt)
RowKey = tuple[Key, int]  # and the choice


class GrammarRefused(Exception):
    """A grammar that cannot be compiled; the text is the reason."""


class GrammarsFull(Exception):
    """No more grammars can be taken in now."""


@dataclass(frozen=True)
class TokenizerSource:
    """Which tokenizer the grammars are about; `vocab_size`: columns of the logits."""

    path: Path
    vocab_size: int
    eos_token_ids: frozenset[int]
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Row:
    """One choice whose next token is wanted."""

    key: Key
    choice: int
    output: Sequence[int]


@dataclass(frozen=True)
class Failure:
    key: Key
    reason: str
    detail: str
    retryable: bool


class _State(Enum):
    NEW = "new"
    COMPILING = "compiling"
    READY = "ready"
    REFUSED = "refused"


@dataclass
class _Entry:
    """A grammar in the cache; `users`: attempts that may need it."""

    number: int
    state: _State = _State.NEW
    error: str = ""
    num_bytes: int = 0
    tries: int = 0
    users: int = 0


@dataclass
class _Automaton:
    number: int
    told: int = 0  # tokens


@dataclass
class _Held:
    """What one attempt needs."""

    grammar: Grammar
    automata: dict[int, _Automaton] = field(default_factory=dict)  # by choice


class Grammars:
    """One worker's. `source` None: the model has no tokenizer, and every grammar is refused."""

    def __init__(
        self,
        source: TokenizerSource | None,
        mask_cpu_s: float = MASK_CPU_S,
        slow_cpu_s: float = SLOW_CPU_S,
        compile_cpu_s: int = COMPILE_CPU_S,
    ) -> None:
        self._compile_cpu_s = compile_cpu_s
        self._source = source
        self._mask_cpu_s = mask_cpu_s
        self._slow_cpu_s = slow_cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: socket.socket | None = None
        self._frames = Frames()
        self._unsent = bytearray()
        self._ready = False
        self._owed = 0  # masks that are still to come, those that nobody waits for any more included
        self._unusable = "" if source else "this model has no tokenizer"
        self._cache: OrderedDict[Grammar, _Entry] = OrderedDict()
        self._held: dict[Key, _Held] = {}
        self._asked: dict[int, tuple[RowKey, float]] = {}  # by automaton, in order; and how long it may take, CPU s
        self._round = 0  # of asking: an answer that nobody waited for belongs to an earlier one
        self._masks: dict[RowKey, bytes | None] = {}
        self._openings: dict[RowKey, int] = {}  # tokens to be allowed as well
        self._failures: list[Failure] = []
        self._numbers = 0

    @property
    def descriptor(self) -> int | None:
        """Becomes readable when `poll` has something to do."""
        return None if self._stream is None else self._stream.fileno()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- compiling -------------------------------------------------------------------------------------------

    def want(self, key: Key, grammar: Grammar) -> bool:
        """Whether the grammar is compiled; from then on it is kept for the attempt, until `forget`.

        Raises GrammarRefused, or GrammarsFull when it cannot even wait."""
        if key in self._held:
            return True
        if self._unusable:
            raise GrammarRefused(f"grammars cannot be served: {self._unusable}")
        entry = self._cache.get(grammar)
        if entry is None:
            compiling = sum(e.state in (_State.NEW, _State.COMPILING) for e in self._cache.values())
            if compiling >= MAX_COMPILING or not self._make_room():
                raise GrammarsFull(f"{compiling} grammars are being compiled, {len(self._cache)} are kept")
            entry = self._cache[grammar] = _Entry(self._number())
        self._cache.move_to_end(grammar)
        if entry.state is _State.REFUSED:
            raise GrammarRefused(entry.error)
        if entry.state is _State.NEW:
            entry.state = _State.COMPILING
            entry.tries += 1
            self._send(["compile", entry.number, grammar.kind, grammar.text])
        if entry.state is _State.READY:
            entry.users += 1
            self._held[key] = _Held(grammar)
        return entry.state is _State.READY

    def _make_room(self) -> bool:
        """Evict what nobody uses, longest unused first, until one more fits."""
        for grammar, entry in list(self._cache.items()):
            used_bytes = sum(e.num_bytes for e in self._cache.values())
            if len(self._cache) < MAX_COMPILED and used_bytes < MAX_COMPILED_BYTES:
                return True
            if entry.users == 0 and entry.state in (_State.READY, _State.REFUSED):
                del self._cache[grammar]
                if entry.state is _State.READY:
                    self._send(["evict", entry.number])
        return len(self._cache) < MAX_COMPILED

    def forget(self, key: Key) -> None:
        """The attempt is over."""
        held = self._held.pop(key, None)
        if held is not None:
            self._cache[held.grammar].users -= 1
            if held.automata:
                self._send(["forget", [a.number for a in held.automata.values()]])

    # --- masks -----------------------------------------------------------------------------------------------

    def ask(self, rows: Sequence[Row]) -> None:
        """Have masks computed for the tokens that follow these outputs."""
        self._round += 1
        self._asked.clear()
        self._masks.clear()
        self._openings.clear()
        orders = []
        for row in rows:
            held = self._held.get(row.key)
            if held is None:
                continue  # it has failed, and whoever asks will hear of it
            start = held.grammar.start(row.output)
            if start is None:
                self._masks[row.key, row.choice] = None
                continue
            if not row.output and held.grammar.opening is not None:
                self._openings[row.key, row.choice] = held.grammar.opening
            output = row.output[start:]
            automaton = held.automata.get(row.choice)
            if automaton is None:
                automaton = held.automata[row.choice] = _Automaton(self._number())
            number = self._cache[held.grammar].number
            untold = list(output[automaton.told :])
            orders.append([automaton.number, number, automaton.told, untold])
            automaton.told = len(output)
            limit_s = self._mask_cpu_s + TOLD_CPU_S * len(untold)
            self._asked[automaton.number] = (row.key, row.choice), limit_s
        if orders:
            self._owed += len(orders)
            self._send(["masks", self._round, orders])

    def collect(self, pump: Callable[[], None]) -> dict[RowKey, bytes | None]:
        """The masks asked for last: bit i of byte i // 8 says whether token i may come next; None: every token may.
        A row that is missing has failed. `pump` is called while there is nothing to do but wait."""
        if not self._asked:
            return self._masks
        started, used_s = time.monotonic(), self._process_cpu_s()
        while self._asked:
            before = len(self._asked)
            if self._stream is not None:
                select.select([self._stream], [], [], PUMP_S)
            self.poll()
            if len(self._asked) < before:
                started, used_s = time.monotonic(), self._process_cpu_s()
                continue
            (key, _), limit_s = next(iter(self._asked.values()))
            if self._process_cpu_s() - used_s > limit_s or time.monotonic() - started > MASK_WALL_S:
                if self._owed == len(self._asked):  # else it is at a question of a step that was cancelled
                    self._fail(key, BAD_GRAMMAR, "following it takes too long", retryable=False)
                self._lose(f"it took too long with a grammar of {key[0]}")
            else:
                pump()
        return self._masks

    def _process_cpu_s(self) -> float:
        """CPU time the grammar process has used; 0 when there is none."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def take_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures

    def _fail(self, key: Key, reason: str, detail: str, *, retryable: bool) -> None:
        if key in self._held:
            self._failures.append(Failure(key, reason, detail, retryable))
            self.forget(key)

    # --- the process -----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what the process has said, and send on what it has not had yet. Never waits."""
        self._flush()
        while self._stream is not None and select.select([self._stream], [], [], 0)[0]:
            try:
                for message in self._frames.read(self._stream):
                    self._handle(message)
            except EOFError:
                self._lose("it ended")

    def _handle(self, message: list[Any]) -> None:
        match message:
            case ["ready"]:
                log.info("the grammar process (%s) is ready", self.pid)
                self._ready = True
                self._flush()
            case ["unusable", reason]:
                self._unusable = reason
            case ["compiled", number, num_bytes, error]:
                self._compiled(number, num_bytes, error)
            case ["mask", turn, automaton, mask, error]:
                self._owed -= 1
                if turn != self._round or automaton not in self._asked:
                    return
                row, _ = self._asked.pop(automaton)
                if error:
                    self._fail(row[0], BAD_GRAMMAR, error, retryable=False)
                else:
                    self._masks[row] = _allowing(self._openings.get(row), mask)
            case _:
                raise AssertionError(f"no such message: {message[0]}")

    def _compiled(self, number: int, num_bytes: int, error: str) -> None:
        for entry in self._cache.values():
            if entry.number == number and entry.state is _State.COMPILING:
                entry.state = _State.REFUSED if error else _State.READY
                entry.num_bytes, entry.error = num_bytes, error

    def _send(self, message: list[Any]) -> None:
        if self._stream is None:
            if message[0] != "compile":
                return  # there is nothing that it could be about
            self._start()
        self._unsent += frame(message)
        self._flush()

    def _flush(self) -> None:
        """As much as goes now. While the process starts nobody reads."""
        while self._stream is not None and self._ready and self._unsent:
            try:
                del self._unsent[: self._stream.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"it cannot be reached: {error}")

    def _start(self) -> None:
        assert self._source is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = {
            "fd": theirs.fileno(),
            "parent": os.getpid(),
            "path": str(self._source.path),
            "vocab_size": self._source.vocab_size,
            "eos": sorted(self._source.eos_token_ids),
            "trust_remote_code": self._source.trust_remote_code,
            "cpus": sorted(os.sched_getaffinity(os.getppid())),  # what the worker had before it was pinned
            "compile_cpu_s": self._compile_cpu_s,
            "slow_cpu_s": self._slow_cpu_s,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.engine.grammar_process", json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is for the worker, which may still need it
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        theirs.close()
        self._stream, self._frames, self._ready = ours, Frames(), False

    def _lose(self, why: str) -> None:
        """Without the process nothing is compiled, and no attempt can go on here. The one that it died over, if it did,
        is told apart: it may try again, but not for ever."""
        if self._asked and self._owed == len(self._asked):
            (key, _), _ = next(iter(self._asked.values()))
            self._fail(key, GRAMMAR_DIED, f"the grammar process: {why}", retryable=True)
        self.close()
        log.warning("the grammar process is lost: %s", why)
        for entry in self._cache.values():
            if entry.state is _State.COMPILING and entry.tries >= MAX_TRIES:
                entry.state, entry.error = _State.REFUSED, "the process that compiled it died of it"
            elif entry.state is not _State.REFUSED:
                entry.state = _State.NEW
        for key in list(self._held):
            self._fail(key, GRAMMAR_LOST, f"the grammar process is lost: {why}", retryable=True)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._asked.clear()
        self._masks.clear()
        self._unsent.clear()
        self._owed = 0
        if self._process is not None and self._stream is not None:
            self._stream.close()
            self._process.kill()
            self._process.wait()
        self._process = self._stream = None


def _allowing(token: int | None, mask: bytes) -> bytes:
    """The mask, with that token let through, if there is one and the mask is about it."""
    if token is None or token >= 8 * len(mask):
        return mask
    bits = bytearray(mask)
    bits[token // 8] |= 1 << token % 8
    return bytes(bits)
