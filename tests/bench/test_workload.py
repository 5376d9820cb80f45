from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pdserve.bench.errors import BenchError
from pdserve.bench.prompts import PromptMaker, id_pieces, word_pieces
from pdserve.bench.traces import TraceRequest
from pdserve.bench.workload import arrival_times, clip_lengths, fit_trace, replay, synthetic

MAKER = PromptMaker(id_pieces(100, 9999), seed=7)


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_prompt_has_exactly_the_length_asked_for_and_starts_with_the_shared_prefix(length: int, prefix: int) -> None:
    one, other = (MAKER.with_prefix(name, length, prefix) for name in ("a", "b"))
    assert len(one) == len(other) == length
    shared = min(prefix, length)
    assert one[:shared] == other[:shared]
    if length - shared > 8:
        assert one[shared:] != other[shared:]


@given(st.integers(1, 100), st.lists(st.integers(0, 5), max_size=12), st.integers(1, 20))
def test_equal_hash_ids_give_equal_tokens_and_others_do_not(length: int, hash_ids: list[int], block: int) -> None:
    prompt = MAKER.from_blocks("a", length, hash_ids, block)
    assert len(prompt) == length
    for index, hash_id in enumerate(hash_ids):
        here = prompt[index * block : (index + 1) * block]
        assert here == MAKER.tokens(f"block/{hash_id}", block)[: len(here)]
    covered = len(hash_ids) * block
    if length - covered > 8:
        assert prompt[covered:] != MAKER.from_blocks("b", length, hash_ids, block)[covered:]


def test_prompts_repeat_with_the_seed_and_differ_without() -> None:
    assert MAKER.tokens("a", 50) == PromptMaker(id_pieces(100, 9999), seed=7).tokens("a", 50)
    assert MAKER.tokens("a", 50) != PromptMaker(id_pieces(100, 9999), seed=8).tokens("a", 50)
    assert MAKER.tokens("a", 20) == MAKER.tokens("a", 50)[:20]


def test_ids_stay_in_their_range() -> None:
    ids = PromptMaker(id_pieces(5, 7), seed=0).tokens("a", 500)
    assert set(ids) == {5, 6, 7}


def test_words_of_a_tokenizer_make_prompts_of_exact_length(tmp_path: Path) -> None:
    vocabulary = {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = word_pieces(tmp_path)
    assert all(piece[0] == vocabulary[" "] and len(piece) > 1 for piece in pieces)
    maker = PromptMaker(pieces, seed=1)
    assert [len(maker.tokens("a", length)) for length in (1, 2, 99)] == [1, 2, 99]


def test_an_unusable_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no such file"):
        word_pieces(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BenchError, match="cannot load"):
        word_pieces(tmp_path)
    empty = Tokenizer(models.BPE(vocab={}, merges=[]))
    empty.pre_tokenizer = pre_tokenizers.Whitespace()
    empty.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BenchError, match="nothing"):
        word_pieces(tmp_path)


def test_arrivals_keep_their_mean_rate_and_repeat_with_the_seed() -> None:
    times = list(islice(arrival_times(50.0, "poisson", seed=3), 5000))
    assert times == sorted(times)
    assert 5000 / times[-1] == pytest.approx(50, rel=0.1)
    assert times == list(islice(arrival_times(50.0, "poisson", seed=3), 5000))
    assert times != list(islice(arrival_times(50.0, "poisson", seed=4), 5000))


def test_uniform_arrivals_have_equal_gaps() -> None:
    assert list(islice(arrival_times(4.0, "uniform", seed=0), 4)) == [0, 0.25, 0.5, 0.75]


def test_warm_up_prompts_are_never_those_of_the_run() -> None:
    def prompts(stream: str) -> list[list[int]]:
        shape = {"input_tokens": 32, "output_tokens": 4, "prefix_tokens": 0}
        return [request.prompt for request in islice(synthetic(MAKER, stream, times=None, **shape), 20)]

    seen = prompts("warmup") + prompts("run")
    assert len({tuple(prompt) for prompt in seen}) == 40


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(2, 4096))
def test_clipped_lengths_fit_the_context_and_are_never_longer_than_asked(
    input_tokens: int, output_tokens: int, context: int
) -> None:
    kept_input, kept_output = clip_lengths(input_tokens, output_tokens, context)
    assert 1 <= kept_input <= input_tokens
    assert 1 <= kept_output <= output_tokens
    assert kept_input + kept_output <= context
    if input_tokens + output_tokens >= context:
        assert kept_input + kept_output == context
    assert clip_lengths(input_tokens, output_tokens, None) == (input_tokens, output_tokens)


def test_speed_divides_times_and_the_cuts_apply_to_scaled_time() -> None:
    trace = [TraceRequest(second, 10, 10) for second in range(10)]
    fit = {"block_tokens": 16, "context_tokens": None}
    assert [r.at_s for r in fit_trace(trace, speed=2, num_requests=None, duration_s=1.5, **fit).requests] == [
        0,
        0.5,
        1,
        1.5,
    ]
    assert [r.at_s for r in fit_trace(trace, speed=0.5, num_requests=3, duration_s=None, **fit).requests] == [0, 2, 4]


def test_what_was_changed_in_a_trace_is_counted() -> None:
    trace = [
        TraceRequest(0, 10, 10),
        TraceRequest(1, 500, 10),
        TraceRequest(2, 0, 10),
        TraceRequest(3, 20, 5, (1, 2)),
        TraceRequest(4, 20, 5, (1, 2, 3)),
    ]
    fit = fit_trace(trace, speed=1, block_tokens=16, context_tokens=100, num_requests=None, duration_s=None)
    assert (fit.num_clipped, fit.num_raised, fit.num_odd_blocks) == (1, 1, 1)
    assert [(r.input_tokens, r.output_tokens) for r in fit.requests] == [(10, 10), (90, 10), (1, 10), (20, 5), (20, 5)]


def test_a_replayed_trace_shares_text_where_it_shares_hash_ids() -> None:
    trace = [TraceRequest(0, 40, 3, (1, 2, 3)), TraceRequest(1, 36, 4, (1, 2, 9)), TraceRequest(2, 8, 5)]
    first, second, third = replay(MAKER, trace, block_tokens=16)
    assert [(len(r.prompt), r.output_tokens, r.at_s) for r in (first, second, third)] == [
        (40, 3, 0),
        (36, 4, 1),
        (8, 5, 2),
    ]
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:36] != second.prompt[32:36]
    assert [r.index for r in (first, second, third)] == [0, 1, 2]
