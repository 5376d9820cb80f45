"""Prompts of an exact number of tokens, as token ids.

They are sent as ids because only then is the length exact and are equal prefixes equal tokens. With a tokenizer
the ids are those of common words; without one they are drawn from a range that holds ordinary text pieces in
practically every vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from tokenizers import Tokenizer

from .errors import BenchError

DEFAULT_FIRST_ID = 1000
DEFAULT_LAST_ID = 7999

WORDS = """
the of and to in is that for it was on are as with they be at one have this from by hot some what there
we can out other were all your when up use word how said each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come
did my sound no most number who over know water than call first people may down side been now find any
new work part take get place made live where after back little only round man year came show every good
me give our under name very through
"""


def id_pieces(first_id: int, last_id: int) -> list[list[int]]:
    """Pieces of one token each, ids first_id … last_id inclusive."""
    return [[token] for token in range(first_id, last_id + 1)]


def word_pieces(tokenizer: Path) -> list[list[int]]:
    """The ids of common words under a tokenizer (a tokenizer.json, or the directory holding one). Raises BenchError."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise BenchError(f"--tokenizer: no such file: {path}")
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every unreadable file
        raise BenchError(f"--tokenizer: cannot load {path}: {error}") from error
    pieces = [list(loaded.encode(f" {word}", add_special_tokens=False).ids) for word in WORDS.split()]
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        raise BenchError(f"--tokenizer: {path} turns common words into nothing")
    return pieces


@dataclass(frozen=True)
class PromptMaker:
    """Draws prompts; the same (seed, name) always gives the same tokens, another name or seed gives others."""

    pieces: Sequence[Sequence[int]]
    seed: int

    def tokens(self, name: str, num_tokens: int) -> list[int]:
        """`num_tokens` ids named `name`. A shorter draw of the same name is a prefix of a longer one."""
        drawn = random.Random(f"{self.seed}/{name}").choices(self.pieces, k=num_tokens)
        return list(islice(chain.from_iterable(drawn), num_tokens))

    def with_prefix(self, name: str, num_tokens: int, prefix_tokens: int) -> list[int]:
        """A prompt whose first `prefix_tokens` ids are the same for every name."""
        prefix = self.tokens("prefix", min(prefix_tokens, num_tokens))
        return prefix + self.tokens(f"prompt/{name}", num_tokens - len(prefix))

    def from_blocks(self, name: str, num_tokens: int, hash_ids: Sequence[int], block_tokens: int) -> list[int]:
        """A prompt made of blocks: equal hash ids give equal ids. What the blocks do not cover is the prompt's own."""
        num_blocks = -(-num_tokens // block_tokens)
        blocks = (self.tokens(f"block/{hash_id}", block_tokens) for hash_id in hash_ids[:num_blocks])
        ids = list(chain.from_iterable(blocks))[:num_tokens]
        return ids + self.tokens(f"prompt/{name}", num_tokens - len(ids))
