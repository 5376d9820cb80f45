"""`python -m pdserve.engine.grammar_process`: compiles grammars and follows them, for one worker.

A process of its own, because a grammar is a program that a client wrote: compiling or following it may take for ever,
and no thread can be stopped. A worker that waits in vain kills this process and starts another one. Every grammar is
compiled in a fork, whose time and memory are bounded, so a slow one holds up nobody who is being served.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xgrammar

from .config import exit_with_parent, setup_logging
from .grammar_compile import Automaton, Compiler, tokenizer_info
from .grammar_wire import Frames, frame

log = logging.getLogger(__name__)

MAX_COMPILED_BYTES = 32 * 1024 * 1024  # as text, from the fork to here
FORK_MEMORY_BYTES = 1 * 1024 * 1024 * 1024
FORKS = 2
PIPE_BYTES = 1 << 20
AUTOMATA_MEMORY_BYTES = 4 * 1024 * 1024 * 1024
SLOW_TOKEN_S = 0.01  # of computing for one automaton, for each of its tokens on average


@dataclass
class Fork:
    """A grammar that is being compiled."""

    grammar: int
    pid: int
    output: bytearray = field(default_factory=bytearray)


class GrammarProcess:
    """Answers one worker until it hangs up."""

    def __init__(self, stream: socket.socket, compiler: Compiler, compile_cpu_s: int, slow_cpu_s: float) -> None:
        self._stream = stream
        self._compiler = compiler
        self._compile_cpu_s = compile_cpu_s
        self._slow_cpu_s = slow_cpu_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(stream, selectors.EVENT_READ)
        self._frames = Frames()
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._num_forks = 0
        self._compiled: dict[int, xgrammar.CompiledGrammar] = {}
        self._automata: dict[int, Automaton] = {}

    def run(self) -> None:
        """Raises EOFError when the worker is gone."""
        self._say(["ready"])
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stream:
                    for message in self._frames.read(self._stream):
                        self._handle(message)
                else:
                    self._read_fork(key.fd, key.data)
            while self._waiting and self._num_forks < FORKS:
                self._fork(*self._waiting.popleft())

    def _say(self, message: list[Any]) -> None:
        self._stream.sendall(frame(message))

    def _handle(self, message: list[Any]) -> None:
        match message:
            case ["compile", grammar, kind, text]:
                self._waiting.append((grammar, kind, text))
            case ["evict", grammar]:
                self._compiled.pop(grammar, None)
            case ["masks", turn, rows]:
                for row in rows:
                    self._say(["mask", turn, row[0], *self._mask(*row)])
            case ["forget", automata]:
                for automaton in automata:
                    self._automata.pop(automaton, None)
            case _:
                raise AssertionError(f"no such message: {message[0]}")

    def _mask(self, automaton: int, grammar: int, start: int, tokens: list[int]) -> tuple[bytes, str]:
        """The mask after `tokens`, which are those from the automaton's token `start` on; or what is wrong."""
        began_s = time.process_time()
        if start == 0:
            self._automata[automaton] = Automaton(self._compiled[grammar], self._compiler.info.vocab_size)
        state = self._automata[automaton]
        assert state.num_tokens == start, f"tokens from {start} on for an automaton at {state.num_tokens}"
        state.accept(tokens)
        mask = state.mask()
        state.spent_s += time.process_time() - began_s
        if state.spent_s > self._slow_cpu_s + SLOW_TOKEN_S * state.num_tokens:
            return b"", "following it takes too long"
        return (mask, "") if any(mask) else (b"", "it leads to where no token can follow")

    # --- compiling -------------------------------------------------------------------------------------------

    def _fork(self, grammar: int, kind: str, text: str) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._compile_and_exit(kind, text, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self._num_forks += 1
        self._selector.register(reading, selectors.EVENT_READ, Fork(grammar, pid))

    def _compile_and_exit(self, kind: str, text: str, writing: int) -> None:
        """In the fork: write an error or the compiled grammar, then end."""
        exit_with_parent(os.getppid())
        resource.setrlimit(resource.RLIMIT_CPU, (self._compile_cpu_s, self._compile_cpu_s))
        limit_memory(FORK_MEMORY_BYTES)
        try:
            output = b"=" + self._compiler.compile(kind, text).serialize_json().encode()
        except ValueError as error:
            output = b"!" + str(error).encode()
        except MemoryError:
            output = b"!it needs too much memory"
        with open(writing, "wb") as pipe:
            pipe.write(output)
        os._exit(0)

    def _read_fork(self, reading: int, fork: Fork) -> None:
        data = os.read(reading, PIPE_BYTES)
        fork.output += data
        if data and len(fork.output) <= MAX_COMPILED_BYTES:
            return
        self._selector.unregister(reading)
        os.close(reading)  # ends a fork that goes on writing
        _, status = os.waitpid(fork.pid, 0)
        self._num_forks -= 1
        num_bytes, error = self._outcome(fork, status)
        self._say(["compiled", fork.grammar, num_bytes, error])

    def _outcome(self, fork: Fork, status: int) -> tuple[int, str]:
        """(memory in bytes, what is wrong) of a fork that has ended."""
        if len(fork.output) > MAX_COMPILED_BYTES:
            return 0, f"it is too large: over {MAX_COMPILED_BYTES} bytes when compiled"
        if status != 0:
            return 0, f"it could not be compiled within {self._compile_cpu_s} s and {FORK_MEMORY_BYTES >> 20} MB"
        result = bytes(fork.output[1:]).decode()
        if fork.output[:1] == b"!":
            return 0, result
        compiled = xgrammar.CompiledGrammar.deserialize_json(result, self._compiler.info)
        self._compiled[fork.grammar] = compiled
        return compiled.memory_size_bytes, ""


def limit_memory(more_bytes: int) -> None:
    """Let this process have that much more than it has now."""
    virtual_pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = virtual_pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def main() -> None:
    """Arguments, as JSON: what `Grammars` wrote there."""
    arguments = json.loads(sys.argv[1])
    exit_with_parent(arguments["parent"])
    setup_logging("warning", False)
    os.sched_setaffinity(0, arguments["cpus"])  # not on the core that the worker is pinned to
    stream = socket.socket(fileno=arguments["fd"])
    try:
        info = tokenizer_info(
            Path(arguments["path"]), arguments["vocab_size"], arguments["eos"], arguments["trust_remote_code"]
        )
    except (ValueError, OSError) as error:
        stream.sendall(frame(["unusable", " ".join(str(error).split())[:500]]))
        return
    limit_memory(AUTOMATA_MEMORY_BYTES)
    try:
        GrammarProcess(stream, Compiler(info), arguments["compile_cpu_s"], arguments["slow_cpu_s"]).run()
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
