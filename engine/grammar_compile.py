"""From a grammar's text to an automaton over a model's tokens. Runs in the grammar process only.

JSON is always written in one way, with one space after `:` and `,` and nowhere else: a small model that may write
white space may write it for ever. Objects get no properties that their schema does not name, unless it says
`additionalProperties`: the texts are a subset of those that the schema allows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from transformers import AutoTokenizer

ANY_OBJECT = '{"type": "object"}'
PROBE_TOKENS = 48
_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time, file and line in front of the library's messages


class Compiler:
    """Compiles for one tokenizer. `vocab_size`: columns of the logits, which may be more than there are tokens."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self.info = info
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        """Raises ValueError with the reason if the text is no grammar, or one that nothing matches."""
        compilers: dict[str, Callable[[], xgrammar.CompiledGrammar]] = {
            "json": lambda: self._compiler.compile_json_schema(ANY_OBJECT, any_whitespace=False),
            "json_schema": lambda: self._compiler.compile_json_schema(text, any_whitespace=False),
            "regex": lambda: self._compiler.compile_regex(text),
            "ebnf": lambda: self._compiler.compile_grammar(text),
        }
        try:
            compiled = compilers[kind]()
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(_WHERE.sub("", " ".join(str(error).split()))) from error
        self._probe(compiled)
        return compiled

    def _probe(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Follow the grammar for some tokens: one that is a labyrinth shows it here, where it can be stopped."""
        draw = random.Random(0)
        automaton = Automaton(compiled, self.info.vocab_size)
        for step in range(PROBE_TOKENS):
            allowed = np.flatnonzero(unpack(automaton.mask(), self.info.vocab_size))
            if len(allowed) == 0:
                if step == 0:
                    raise ValueError("no text matches it")
                return
            token = int(allowed[draw.randrange(len(allowed))])
            if token in self.info.stop_token_ids or not automaton.accept([token]):
                return


class Automaton:
    """Follows one choice's tokens through a grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
        self._columns = np.packbits(np.arange(self._bits.size * 32) < vocab_size, bitorder="little")
        self.num_tokens = 0
        self.spent_s = 0.0  # kept by whoever has it work
        self._lost = False

    def accept(self, tokens: Sequence[int]) -> bool:
        """Go on by these tokens. False for good once one of them does not fit."""
        for token in tokens:
            self._lost = self._lost or self._matcher.is_terminated() or not self._matcher.accept_token(token)
        self.num_tokens += len(tokens)
        return not self._lost

    def mask(self) -> bytes:
        """Bit i (of byte i // 8, lowest first): may token i come next? EOS tokens may when the text is complete."""
        if self._lost or self._matcher.is_terminated():
            return bytes(self._bits.nbytes)
        self._matcher.fill_next_token_bitmask(self._bits)
        mask: bytes = (self._bits.view(np.uint8)[0] & self._columns).tobytes()
        return mask


def unpack(mask: bytes, vocab_size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")


def tokenizer_info(
    path: Path, vocab_size: int, eos_token_ids: Sequence[int], trust_remote_code: bool
) -> xgrammar.TokenizerInfo:
    """What the library needs to know of the model's tokenizer. Special tokens have no text, so no grammar has a place
    for them. Raises ValueError or OSError when the tokenizer cannot be used."""
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(path), trust_remote_code=trust_remote_code, local_files_only=True
    )
    stops = [token for token in eos_token_ids if token < vocab_size]
    if not stops:
        raise ValueError("the model has no end-of-sequence token, so nothing could end a text that is complete")
    found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    vocabulary = [""] * vocab_size
    for piece, token in tokenizer.get_vocab().items():
        if token < vocab_size and token not in special:
            vocabulary[token] = piece
    return xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=found.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=stops,
        add_prefix_space=found.add_prefix_space,
    )
