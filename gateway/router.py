"""Which workers get a request: policies as small pure functions, and what is known about who has which prefix.

A policy sees pairs: a decode worker with room, together with a prefill worker linked to it (or None where decode has
to compute the prompt itself), and returns the one to use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

PREFIX_BLOCK_TOKENS = 64
PREFIX_INDEX_BLOCKS = 65_536  # about 4 million tokens of prefixes remembered per worker

TRANSFER_COST = 0.1  # moving the KV of one token, in units of computing one
RUNNING_COST_TOKENS = 16.0  # what one more sequence in a decode worker's batch is worth, in prompt tokens
NO_ROOM_COST_TOKENS = 100_000.0  # a decode worker without free blocks for the prompt is the last choice

LocalPrefillMode = Literal["auto", "never"]
PolicyName = Literal["prefix_aware", "least_loaded", "round_robin"]


@dataclass(frozen=True)
class DecodeLoad:
    worker: str
    free_tokens: int  # what fits into free and evictable blocks
    inflight: int  # attempts of this gateway placed there


@dataclass(frozen=True)
class PrefillLoad:
    worker: str
    queued_tokens: int  # prompt tokens still to be computed there
    inflight: int


@dataclass(frozen=True)
class Pair:
    decode: DecodeLoad
    prefill: PrefillLoad | None


@dataclass(frozen=True)
class Ask:
    """The request to place. `overlap`: prompt tokens each worker is believed to have cached."""

    prompt_tokens: int
    turn: int  # how many requests were placed before
    overlap: Mapping[str, int] = field(default_factory=dict)


Policy = Callable[[Sequence[Pair], Ask], Pair]


def _names(pair: Pair) -> tuple[str, str]:
    return pair.decode.worker, pair.prefill.worker if pair.prefill else ""


def round_robin(pairs: Sequence[Pair], ask: Ask) -> Pair:
    """Every pair in turn."""
    return sorted(pairs, key=_names)[ask.turn % len(pairs)]


def least_loaded(pairs: Sequence[Pair], ask: Ask) -> Pair:
    """The decode worker with the fewest requests, then most room; the prefill worker with the least to compute."""

    def load(pair: Pair) -> tuple[int, int, int]:
        return pair.decode.inflight, pair.prefill.queued_tokens if pair.prefill else 0, -pair.decode.free_tokens

    return min(_rotated(pairs, ask.turn), key=load)


def prefix_aware(pairs: Sequence[Pair], ask: Ask) -> Pair:
    """The pair with the lowest price in tokens: what must be computed, and waited for, and moved."""
    return min(_rotated(pairs, ask.turn), key=lambda pair: price_tokens(pair, ask))


def price_tokens(pair: Pair, ask: Ask) -> float:
    decode_missing = ask.prompt_tokens - ask.overlap.get(pair.decode.worker, 0)
    price = RUNNING_COST_TOKENS * pair.decode.inflight
    if pair.decode.free_tokens < decode_missing:
        price += NO_ROOM_COST_TOKENS
    if pair.prefill is None:
        return price + decode_missing
    # Prefill computes what it has not cached itself, but need not compute less than decode lacks: what decode holds
    # is sent by nobody, yet its KV must be there for attention, so only prefill's own overlap saves computing.
    prefill_missing = ask.prompt_tokens - ask.overlap.get(pair.prefill.worker, 0)
    return price + pair.prefill.queued_tokens + prefill_missing + TRANSFER_COST * decode_missing


def _rotated(pairs: Sequence[Pair], turn: int) -> list[Pair]:
    """Pairs in an order that changes with every request, so that equals share the load."""
    ordered = sorted(pairs, key=_names)
    start = turn % len(ordered)
    return ordered[start:] + ordered[:start]


POLICIES: dict[PolicyName, Policy] = {
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}


def prefix_chain(token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
    """One key per full block of PREFIX_BLOCK_TOKENS tokens, each standing for everything up to its end."""
    return list(_chain(token_ids, cache_salt))


def _chain(token_ids: Sequence[int], cache_salt: str) -> Iterator[bytes]:
    key = blake2b(cache_salt.encode(), digest_size=16).digest()
    for end in range(PREFIX_BLOCK_TOKENS, len(token_ids) + 1, PREFIX_BLOCK_TOKENS):
        block = array("Q", token_ids[end - PREFIX_BLOCK_TOKENS : end]).tobytes()
        key = blake2b(key + block, digest_size=16).digest()
        yield key


class PrefixIndex:
    """Which prefix blocks a worker is believed to hold, least recently used first; learned from its answers."""

    def __init__(self, max_blocks: int = PREFIX_INDEX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def learn(self, chain: Sequence[bytes]) -> None:
        """The worker computed or received this prefix. Its end ages first, as in the worker's own cache."""
        for key in reversed(chain):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def correct(self, chain: Sequence[bytes], held_tokens: int) -> None:
        """The worker said it holds only `held_tokens` of this prefix: forget the blocks it turned out to lack."""
        for key in chain[-(-held_tokens // PREFIX_BLOCK_TOKENS) :]:
            self._blocks.pop(key, None)

    def overlap_tokens(self, chain: Sequence[bytes]) -> int:
        count = 0
        for key in chain:
            if key not in self._blocks:
                break
            count += 1
        return count * PREFIX_BLOCK_TOKENS
