"""One prompt, as the prefill pool holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..engine.block_pool import BlockTable
from ..transfer.messages import Prefill
from ..transfer.sender import Outgoing

Key = tuple[str, int]  # (request id, attempt)


class State(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    SENDING = "sending"
    FINISHED = "finished"


@dataclass(eq=False)
class Prompt:
    """Only the scheduler changes `state` and `table`."""

    message: Prefill
    table: BlockTable
    outgoing: Outgoing
    arrived_at: float  # monotonic seconds
    state: State = State.WAITING
    started_at: float = 0.0
    num_cached: int = 0
    tokens: list[int] = field(init=False)  # all that has to be computed: the prompt and, if resumed, its output

    def __post_init__(self) -> None:
        self.tokens = self.message.prompt + self.message.output

    @property
    def key(self) -> Key:
        return self.message.request, self.message.attempt

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.table.num_computed


@dataclass(frozen=True)
class Work:
    """Run `count` tokens of `prompt` from position `start`."""

    prompt: Prompt
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        return self.end == len(self.prompt.tokens)
