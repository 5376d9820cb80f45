"""What a decode step has to say, gathered so that every gateway gets it in one message."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..transfer.membership import GatewayTie
from ..transfer.messages import Finish, TokenLogprobs, Tokens

Item = tuple[str, int, int, int, int, Finish]


@dataclass
class _Said:
    items: list[Item] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Outbox:
    """Tokens since the last `send`, by gateway."""

    def __init__(self) -> None:
        self._said: dict[GatewayTie, _Said] = {}

    def add(self, tie: GatewayTie, item: Item, logprobs: TokenLogprobs | None) -> None:
        said = self._said.setdefault(tie, _Said())
        if logprobs is not None:
            said.logprobs[len(said.items)] = logprobs
        said.items.append(item)

    def send(self) -> None:
        for tie, said in self._said.items():
            tie.send(Tokens(said.items, said.logprobs))
        self._said.clear()
