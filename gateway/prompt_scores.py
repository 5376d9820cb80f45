"""The log probabilities of one prompt's tokens, as they come in."""

from __future__ import annotations

from collections.abc import Sequence

from ..transfer.messages import TokenLogprobs


class PromptScores:
    """Entries of tokens 1, 2, … of a prompt, `wanted` of them in all; 0 when they were not asked for."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.entries: list[TokenLogprobs] = []

    @property
    def complete(self) -> bool:
        return len(self.entries) == self._wanted

    def restart(self) -> None:
        """A new attempt computes them anew, unless all are here."""
        if not self.complete:
            self.entries.clear()

    def take(self, first: int, entries: Sequence[TokenLogprobs]) -> bool:
        """Take those of tokens [first, …), but for what is here already. False when some before them are missing, or
        there are more than the prompt has tokens."""
        known = len(self.entries) + 1 - first
        if known < 0 or first + len(entries) > self._wanted + 1:
            return False
        self.entries += entries[known:]
        return True
