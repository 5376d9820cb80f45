"""Log probabilities equal the log-softmax of the reference's logits, of sampled tokens and of a prompt's own."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.kv_cache import KVCache
from pdserve.engine.logprobs import ROWS_AT_ONCE, sampled_logprobs, score_prompts, token_logprobs
from pdserve.engine.runner import Chunk, Runner
from pdserve.engine.sampler import NOT_FINITE, SampleRow, sample
from pdserve.transfer.errors import StepCancelled
from pdserve.transfer.messages import LEAST_LOGPROB, TokenLogprobs
from pdserve.transfer.sampling_params import SamplingParams
from tests.engine.tiny_models import build, load, prompts

TOLERANCE = 1e-4
HEADS = ("llama", "gemma2", "granite", "cohere2", "gpt2", "gpt-neox", "llama4")  # tied, soft cap, scaling, bias …


def row(logprobs: int | None, **fields: object) -> SampleRow:
    mask = fields.pop("mask", None)
    return SampleRow(SamplingParams(max_tokens=9, seed=3, logprobs=logprobs, **fields), [1, 2], [], 0, mask)  # type: ignore[arg-type]


def assert_says(entry: TokenLogprobs, logits: torch.Tensor, token: int, top: int) -> None:
    """`entry` is what log-softmax says of `token`, and of the `top` most likely ones."""
    expected = logits.double().log_softmax(-1)
    assert entry.logprob == pytest.approx(expected[token].item(), abs=TOLERANCE)
    assert entry.rank == 1 + int((expected > expected[token]).sum())
    values, ids = expected.topk(top)
    assert [token for token, _ in entry.top] == ids.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_rows_that_ask_get_the_raw_log_softmax_whatever_is_done_to_their_logits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 50) * 3
    rows = [
        row(None), row(3, temperature=0.3, logit_bias={7: 50.0}), row(0, repetition_penalty=2.0), row(None),
        row(2, mask=bytes([0, 1 << 5, 0, 0, 0, 0, 0])),
    ]  # fmt: skip
    tokens = sample(logits, rows, frozenset({0}))
    first, biased, bare, last, constrained = sampled_logprobs(logits, rows, tokens)
    assert (first, last) == (None, None)
    assert (tokens[1], tokens[4]) == (7, 13)
    assert constrained is not None
    assert_says(constrained, logits[4], 13, 2)
    assert biased is not None
    assert bare is not None
    assert_says(biased, logits[1], 7, 3)
    assert_says(bare, logits[2], tokens[2], 0)


def test_a_row_without_a_usable_token_has_no_entry_and_its_neighbours_do() -> None:
    logits = torch.randn(3, 10)
    logits[1, 4] = float("nan")
    rows = [row(2)] * 3
    tokens = sample(logits, rows, frozenset())
    assert tokens[1] == NOT_FINITE
    entries = sampled_logprobs(logits, rows, tokens)
    assert [entry is None for entry in entries] == [False, True, False]
    assert token_logprobs(logits, [0, 0, 0], [1, 1, 1])[1] is None


def test_what_is_impossible_or_certain_stays_within_bounds() -> None:
    logits = torch.full((1, 5), float("-inf"))
    logits[0, 2] = 4.0
    certain, impossible = (token_logprobs(logits, [token], [2])[0] for token in (2, 3))
    assert certain is not None
    assert impossible is not None
    assert (certain.logprob, certain.rank) == (0.0, 1)
    assert (impossible.logprob, impossible.rank) == (LEAST_LOGPROB, 2)
    assert certain.top[1][1] == LEAST_LOGPROB


@pytest.mark.parametrize("family", HEADS)
def test_prompt_scores_equal_the_reference_through_chunks_beside_other_sequences(family: str) -> None:
    model = build(family)
    one, other = prompts([41, 30])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([one]), use_cache=False).logits[0]
    loaded = load(model)
    runner = Runner(loaded, KVCache(loaded.layout, 32, 8))
    entries: list[TokenLogprobs] = []
    for start in range(0, len(one), 11):
        part = one[start : start + 11]
        targets = one[start + 1 : start + len(part) + 1]
        beside = Chunk(other[:7], 0, [20], False)
        chunks = [beside, Chunk(part, start, list(range(6)), False, targets, 3)]
        runner.forward(chunks)
        nothing, mine = score_prompts(runner, chunks, lambda: None)
        assert nothing == []
        assert mine is not None
        entries += mine
    assert len(entries) == len(one) - 1
    for entry, logits, token in zip(entries, expected, one[1:], strict=False):
        assert_says(entry, logits.float(), token, 3)


def test_a_long_chunk_is_scored_a_few_rows_at_a_time_and_can_be_given_up_between_them() -> None:
    loaded = load(build("llama"))
    runner = Runner(loaded, KVCache(loaded.layout, 32, 8))
    prompt = prompts([ROWS_AT_ONCE * 2 + 5])[0]
    chunk = Chunk(prompt, 0, list(range(32)), True, prompt[1:])
    groups: list[int] = []
    runner.head.logits, heads = lambda rows: groups.append(len(rows)) or heads(rows), runner.head.logits  # type: ignore[method-assign]
    runner.forward([chunk])
    (entries,) = score_prompts(runner, [chunk], lambda: None)
    assert entries is not None
    assert len(entries) == len(prompt) - 1
    assert max(groups) == ROWS_AT_ONCE

    def give_up() -> None:
        if len(groups) > 4:
            raise StepCancelled

    runner.forward([chunk])
    with pytest.raises(StepCancelled):
        list(score_prompts(runner, [chunk], give_up))
    assert len(groups) < 2 * 3
