"""One choice of one request, as the decode pool holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..engine.block_pool import BlockTable
from ..transfer.messages import LocalPrefill
from ..transfer.sampling_params import SamplingParams

Key = tuple[str, int]  # (request id, attempt)


class State(Enum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt + output. Only the scheduler changes `state`, `table` and the token lists.

    `num_choices` > 1 until the prompt's KV is complete: the choices that still stand for themselves in this one.
    `rank`: smaller goes first; fixed at arrival and kept across preemption.
    """

    request: str
    attempt: int
    choice: int
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    rank: tuple[float, int, int]
    table: BlockTable
    prefill: str = ""
    local_prefill: LocalPrefill = "always"
    local_reason: str = ""
    num_choices: int = 1
    unwanted: set[int] = field(default_factory=set)  # choices cancelled before they stood for themselves
    reservation: int = 0
    announced: bool = False  # the gateway has been told of the reservation
    streaming_since: float = 0.0  # when it got its first token here
    begun: bool = False  # prefill has said or shown that it is at it
    deadline: float = 0.0
    scored: int = 0  # tokens of the prompt whose log probabilities have been sent, from token 1 on
    state: State = State.WAITING
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.prompt + self.output

    @property
    def key(self) -> Key:
        return self.request, self.attempt

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is not there yet; 1 for a sequence that is simply decoding."""
        return len(self.tokens) - self.table.num_computed

    @property
    def scoring(self) -> bool:
        """Are log probabilities of the prompt still to come from here?"""
        return self.params.prompt_logprobs is not None and self.scored < len(self.prompt) - 1

    def append(self, token: int) -> None:
        self.output.append(token)
        self.tokens.append(token)


@dataclass(frozen=True)
class Work:
    """Run `count` tokens of `sequence` from position `start`; `samples` when that reaches its last token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)
