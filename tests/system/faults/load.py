"""What is asked of the system under attack, what it must answer, and the streams that keep asking."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.exact.reference import generate

TIE_MARGIN = 1e-3  # a prompt whose two best logits ever come closer than this is not used
DEADLINE_S = 60.0  # of a whole answer; one that takes longer hangs
NUM_SALTS = 4  # enough that caches seldom help, and few, so that what is remembered of prefixes is no growth
NEVER = float("inf")


@dataclass(frozen=True)
class Case:
    """One request with the answer an undisturbed system gives."""

    name: str
    body: dict[str, Any]
    golden: tuple[ChoiceAnswer, ...] = ()
    golden_usage: tuple[int, int] = (0, 0)  # prompt and completion tokens


@dataclass
class ChoiceAnswer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """What came back, complete or not. Exactly one of `complete`, `error`, `broken` and `hung` is set, or `left`."""

    case: Case
    stream: bool
    started_at: float
    ended_at: float = NEVER
    choices: dict[int, ChoiceAnswer] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    complete: bool = False
    status: int = 0
    error: dict[str, Any] | None = None  # the API's error object
    retry_after: str | None = None
    broken: str = ""  # the connection ended without a last word
    hung: bool = False
    left: bool = False  # this client went away
    first_token_s: float | None = None

    def take(self, body: dict[str, Any]) -> None:
        """Account for one chunk of a stream, or for a whole answer."""
        if body.get("usage"):
            self.usage = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
        for item in body["choices"]:
            choice = self.choices.setdefault(item["index"], ChoiceAnswer())
            choice.text += item["text"]
            choice.token_ids += item.get("token_ids") or []
            choice.finish_reason = item["finish_reason"] or choice.finish_reason
            if self.first_token_s is None and item.get("token_ids"):
                self.first_token_s = time.monotonic() - self.started_at


class Leave:
    """Lets somebody else end a client's connection at a moment of his choice."""

    def __init__(self) -> None:
        self.gone = False
        self._sent = threading.Event()
        self._socket: socket.socket | None = None

    def attach(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sent.set()

    def go(self) -> None:
        assert self._sent.wait(DEADLINE_S), "nothing was asked"
        assert self._socket is not None
        self.gone = True
        self._socket.shutdown(socket.SHUT_RDWR)


def ask(
    port: int, case: Case, *, stream: bool, salt: str = "", leave: Leave | None = None, leave_s: float = NEVER
) -> Answer:
    """Ask once and wait for the end, at most DEADLINE_S. With `leave` or `leave_s` the client goes away early."""
    body = case.body | {"stream": stream, "return_token_ids": True, "cache_salt": salt}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = Answer(case, stream, time.monotonic())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    until = answer.started_at + min(leave_s, DEADLINE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.sock is not None
        if leave is not None:
            leave.attach(connection.sock)
        connection.sock.settimeout(max(until - time.monotonic(), 0.001))
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.retry_after = response.headers["Retry-After"]
            answer.error = json.loads(response.read())["error"]
        elif stream:
            _read_events(response, connection, answer, until)
        else:
            answer.take(json.loads(response.read()))
            answer.complete = True
    except TimeoutError:
        answer.left = leave_s < DEADLINE_S
        answer.hung = not answer.left
    except (OSError, http.client.HTTPException) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    if leave is not None and leave.gone and not answer.complete:
        answer.left, answer.broken = True, ""
    answer.ended_at = time.monotonic()
    return answer


def _read_events(
    response: http.client.HTTPResponse, connection: http.client.HTTPConnection, answer: Answer, until: float
) -> None:
    """Take in a stream. Raises TimeoutError when `until` has come."""
    while line := response.readline():
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            answer.complete = answer.error is None
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            answer.error = event["error"]
        else:
            answer.take(event)
        if (left_s := until - time.monotonic()) <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
    if answer.error is None:
        answer.broken = "the stream ended without [DONE]"


# --- cases and their golden answers --------------------------------------------------------------------------------


def has_tie(model: Any, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Do the two best logits come so close anywhere on the way that rounding could decide?"""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]])
        logits = model(input_ids=ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()
    best, second = logits.topk(2).values.unbind(-1)
    return bool((best - second).min() < TIE_MARGIN)


def greedy_cases(
    name: str,
    reference: Any,
    make_prompt: Callable[[random.Random, int], list[int]],
    rng: random.Random,
    count: int,
    lengths: tuple[int, int],
    outputs: tuple[int, int],
) -> list[Case]:
    """Prompts without a near-tie. The reference's own text says where the system's will go."""
    made: list[Case] = []
    for _ in range(20 * count):
        prompt = make_prompt(rng, rng.randint(*lengths))
        num_tokens = rng.randint(*outputs)
        if has_tie(reference, prompt, generate(reference, prompt, num_tokens, ignore_eos=True)):
            continue
        body = {"model": name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        made.append(Case(f"greedy-{len(made)}", body))
        if len(made) == count:
            return made
    raise AssertionError(f"only {len(made)} of {count} prompts are free of ties")


def varied_cases(greedy: Sequence[Case], rng: random.Random) -> list[Case]:
    """The same prompts asked for in other ways: sampled, several choices, penalties."""
    sampled = {"temperature": 0.9, "top_p": 0.95}
    ways: list[dict[str, Any]] = [
        {"seed": rng.getrandbits(31), **sampled},
        {"seed": rng.getrandbits(31), "n": 2, **sampled},
        {"seed": rng.getrandbits(31), "presence_penalty": 0.7, "repetition_penalty": 1.1, **sampled},
        {"n": 2, "max_tokens": 40},
    ]
    bodies = [replace(case, body=case.body | way) for case, way in zip(greedy, ways, strict=False)]
    return [replace(case, name=f"varied-{number}") for number, case in enumerate(bodies)]


def stop_case(case: Case) -> Case:
    """The same greedy request with a stop string out of the second half of its text."""
    (choice,) = case.golden
    text = choice.text
    for at in range(len(text) // 2, len(text) - 3):
        piece = text[at : at + 3]
        if piece.isascii() and piece.isprintable() and text.index(piece) == at:
            return Case(f"stop-{case.name}", case.body | {"stop": [piece]})
    return case


def with_golden(port: int, cases: Iterable[Case]) -> list[Case]:
    """Ask the undisturbed system, as a stream and at once: both must agree, and that is the golden answer."""
    made = []
    for case in cases:
        streamed, whole = (ask(port, case, stream=stream) for stream in (True, False))
        for answer in (streamed, whole):
            assert answer.complete, f"{case.name}: the undisturbed system answered {answer.status} {answer.error}"
            assert answer.usage is not None
        assert streamed.choices == whole.choices, f"{case.name}: streamed and whole differ"
        golden = tuple(choice for _, choice in sorted(whole.choices.items()))
        assert whole.usage is not None
        made.append(replace(case, golden=golden, golden_usage=whole.usage))
    return made


# --- the streams ---------------------------------------------------------------------------------------------------


class Load:
    """So many clients, each asking one thing after the other until told to stop. Answers go to `on_answer`."""

    def __init__(
        self, port: int, greedy: Sequence[Case], other: Sequence[Case], on_answer: Callable[[Answer], None], seed: int
    ) -> None:
        self._port = port
        self._on_answer = on_answer
        self._stop = threading.Event()
        self._open = 0
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        plans = [(greedy, 1.0)] * 8 + ([(other, 0.5)] * 2 if other else [])
        self._threads = [
            threading.Thread(target=self._run, args=(cases, streamed, random.Random(f"{seed}/{number}")))
            for number, (cases, streamed) in enumerate(plans)
        ]

    @property
    def open(self) -> int:
        """Requests under way now."""
        return self._open

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every client finish its request (or its deadline). Raises what a client raised."""
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S + 10)
            assert not thread.is_alive(), "a client outlived its deadline"
        if self.failure is not None:
            raise self.failure

    def _run(self, cases: Sequence[Case], streamed: float, rng: random.Random) -> None:
        try:
            while not self._stop.is_set():
                case, stream = rng.choice(cases), rng.random() < streamed
                salt = str(rng.randrange(NUM_SALTS))
                with self._lock:
                    self._open += 1
                try:
                    answer = ask(self._port, case, stream=stream, salt=salt)
                finally:
                    with self._lock:
                        self._open -= 1
                self._on_answer(answer)
                if answer.status == 503 and self._stop.wait(float(answer.retry_after or 1)):
                    return
        except BaseException as error:
            self.failure = error
