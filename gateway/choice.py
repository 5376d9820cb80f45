"""One choice of a request, as the gateway counts its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..transfer.messages import Finish

MAX_EARLY_TOKENS = 4096


@dataclass
class ChoiceState:
    """Tokens accepted, in order; tokens that came before their turn, by index; and who ended the choice, if it has
    ended: decode (its last token, or its finish reason) or the gateway (a stop string)."""

    accepted: list[int] = field(default_factory=list)
    early: dict[int, tuple[int, Finish]] = field(default_factory=dict)
    ended_by: Literal["", "decode", "gateway"] = ""

    def disagrees(self, index: int, token: int) -> bool:
        """Was another token accepted at that index? Then what follows it belongs to another text."""
        return index < len(self.accepted) and self.accepted[index] != token

    def note(self, index: int, token: int, finish: Finish) -> bool:
        """Keep a token for its turn; one that was accepted before is ignored. False when too many wait for another
        one, which must have been lost."""
        if index >= len(self.accepted):
            self.early[index] = token, finish
        return len(self.early) <= MAX_EARLY_TOKENS

    def next(self) -> tuple[int, Finish] | None:
        """The token whose turn it is, if it is here."""
        return self.early.pop(len(self.accepted), None)
