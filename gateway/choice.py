"""One choice of a request, as the gateway counts its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..transfer.messages import Finish, TokenLogprobs

MAX_EARLY_TOKENS = 4096


@dataclass(frozen=True)
class Taken:
    """A token of a choice, as a worker sent it."""

    token: int
    finish: Finish
    logprobs: TokenLogprobs | None = None


@dataclass
class ChoiceState:
    """Tokens accepted, in order; tokens that came before their turn, by index; and who ended the choice, if it has
    ended: decode (its last token, or its finish reason) or the gateway (a stop string)."""

    accepted: list[int] = field(default_factory=list)
    early: dict[int, Taken] = field(default_factory=dict)
    ended_by: Literal["", "decode", "gateway"] = ""

    def disagrees(self, index: int, token: int) -> bool:
        """Was another token accepted at that index? Then what follows it belongs to another text."""
        return index < len(self.accepted) and self.accepted[index] != token

    def note(self, index: int, taken: Taken) -> bool:
        """Keep a token for its turn; one that was accepted before is ignored. False when too many wait for another
        one, which must have been lost."""
        if index >= len(self.accepted):
            self.early[index] = taken
        return len(self.early) <= MAX_EARLY_TOKENS

    def next(self) -> Taken | None:
        """The token whose turn it is, if it is here."""
        return self.early.pop(len(self.accepted), None)


class Sink(Protocol):
    """Where accepted tokens go, in order, each once."""

    def prompt_logprobs(self, first_choice: int, entries: Sequence[TokenLogprobs]) -> None:
        """What the prompt of this choice and its siblings is to come with; before any token of theirs."""
        ...

    def token(self, choice: int, token: int, finish: Finish, logprobs: TokenLogprobs | None) -> bool:
        """Take a token. True when the choice is over with it for a reason of ours (a stop string)."""
        ...

    def late_finish(self, choice: int, finish: Finish) -> None:
        """The token taken last was the choice's last one (or it has none at all)."""
        ...
