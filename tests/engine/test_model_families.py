"""Every supported family gives the text of `generate`, whatever the schedule and wherever the blocks lie."""

from __future__ import annotations

import pytest

from pdserve.engine.runner import Runner
from tests.engine.tiny_models import (
    FAMILIES,
    TinySequence,
    build,
    fragmented_tables,
    load,
    poisoned_cache,
    prompts,
    reference,
    step,
)

PROMPT_LENS = (41, 1, 17, 26)  # the longest is several windows long
CHUNK_TOKENS = (7, 1, 5, 13)
OUTPUT_TOKENS = 14
BLOCK_SIZE = 5


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate_through_chunks_and_mixed_batches(family: str) -> None:
    model = build(family)
    texts = prompts(PROMPT_LENS)
    expected = [reference(model, prompt, OUTPUT_TOKENS) for prompt in texts]
    loaded = load(model)
    tables = fragmented_tables(64, [length + OUTPUT_TOKENS for length in PROMPT_LENS], BLOCK_SIZE)
    cache = poisoned_cache(loaded, 64, BLOCK_SIZE)
    runner = Runner(loaded, cache)
    sequences = [
        TinySequence(prompt, blocks, chunk_tokens)
        for prompt, blocks, chunk_tokens in zip(texts, tables, CHUNK_TOKENS, strict=True)
    ]
    for turn in range(60):
        # Sequence i joins at turn i, so prefill chunks of one run beside decode tokens of others.
        running = [s for i, s in enumerate(sequences) if turn >= i and len(s.output) < OUTPUT_TOKENS]
        if running:
            step(runner, running)
    assert [sequence.output for sequence in sequences] == expected
    assert len({tuple(text) for text in expected}) >= 3, "degenerate models would prove nothing"
