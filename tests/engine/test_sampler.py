"""The sampler: what each parameter does, and that noise depends on (seed, choice, position) alone."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampler import NOT_FINITE, SampleRow, _draw, gumbel, noise_words, sample, survivors
from pdserve.transfer.sampling_params import SamplingParams

EOS = frozenset({2})
VOCAB = 12
CHI_SQUARE_LIMIT = {2: 18.4, 3: 21.1, 7: 29.9, 8: 31.8}  # degrees of freedom → passed by 9,999 of 10,000 fair samples


def row(prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), choice: int = 0, **fields: object) -> SampleRow:
    params = SamplingParams(**({"max_tokens": 100, "seed": 0, "temperature": 0.0} | fields))  # type: ignore[arg-type]
    return SampleRow(params, prompt, output, choice)


def sample_one(logits: list[float], one: SampleRow) -> int:
    return sample(torch.tensor([logits]), [one], EOS)[0]


def assert_fair(tokens: list[int], probabilities: list[float]) -> None:
    """Pearson's chi-square against the exact distribution; tokens of probability 0 must not occur."""
    counts = Counter(tokens)
    possible = [token for token, probability in enumerate(probabilities) if probability > 0]
    assert set(counts) <= set(possible)
    expected = {token: probabilities[token] * len(tokens) for token in possible}
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in possible)
    assert chi_square < CHI_SQUARE_LIMIT[len(possible) - 1]


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


# --- greedy ----------------------------------------------------------------------------------------------------


def test_greedy_rows_take_the_argmax_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 5.0], [-2.0, -1.0, -1.0]])
    assert sample(logits, [row()] * 3, EOS) == [1, 0, 1]


@given(st.lists(st.integers(-3, 3), min_size=4, max_size=4))
def test_greedy_row_with_idle_processors_equals_the_fast_path(values: list[int]) -> None:
    logits = [float(value) for value in values]
    assert sample_one(logits, row(logit_bias={0: 0.0})) == sample_one(logits, row())


def test_an_empty_batch_gives_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), [], EOS) == []


# --- unusable logits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[1.0, math.nan, 9.0], [1.0, math.inf, 9.0], [-math.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_row_fails_alone(bad: list[float], temperature: float) -> None:
    good = [0.5, 0.25, 4.0]
    rows = [row(temperature=temperature, seed=seed) for seed in range(3)]
    tokens = sample(torch.tensor([good, bad, good]), rows, EOS)
    alone = sample(torch.tensor([good, good]), [rows[0], rows[2]], EOS)
    assert tokens == [alone[0], NOT_FINITE, alone[1]]


def test_tokens_with_minus_infinity_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]] * 200)
    tokens = sample(logits, [row(temperature=50.0, seed=seed) for seed in range(200)], EOS)
    assert set(tokens) == {0, 2}


# --- bias, min_tokens, penalties -------------------------------------------------------------------------------


def test_logit_bias_moves_the_argmax_and_unknown_ids_are_ignored() -> None:
    assert sample_one([1.0, 2.0, 0.0], row(logit_bias={0: 1.5, 99: 100.0})) == 0
    assert sample_one([1.0, 2.0, 0.0], row(logit_bias={1: -100.0})) == 0


def test_min_tokens_bars_eos_and_stop_ids_until_that_many_are_out() -> None:
    logits = [0.0, 1.0, 9.0, 8.0]
    waiting = {"min_tokens": 2, "stop_token_ids": [3, 99]}
    assert sample_one(logits, row(output=(0,), **waiting)) == 1
    assert sample_one(logits, row(output=(0, 0), **waiting)) == 2


def test_min_tokens_wins_over_a_bias_towards_eos() -> None:
    assert sample_one([0.0, 1.0, 0.0], row(min_tokens=1, logit_bias={2: 1000.0})) == 1


def test_ignore_eos_leaves_eos_drawable_but_stop_ids_barred() -> None:
    waiting = {"min_tokens": 2, "ignore_eos": True}
    assert sample_one([0.0, 1.0, 9.0, 10.0], row(stop_token_ids=[3], **waiting)) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wholly_barred_vocabulary_still_gives_the_argmax(temperature: float) -> None:
    barred = row(min_tokens=1, stop_token_ids=[0, 1, 2], temperature=temperature)
    assert sample_one([0.0, 5.0, 1.0], barred) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    assert sample_one([4.0, 3.0, 0.0], row(prompt=(0,), repetition_penalty=2.0)) == 1  # 4 / 2 < 3
    assert sample_one([4.0, 3.0, 0.0], row(prompt=(2,), output=(0, 0), repetition_penalty=1.3)) == 0  # once, not twice
    assert sample_one([-1.0, -1.5, -9.0], row(prompt=(0,), repetition_penalty=2.0)) == 1  # -1 * 2 < -1.5


def test_frequency_penalty_counts_output_only() -> None:
    logits = [3.0, 2.0, 0.0]
    assert sample_one(logits, row(prompt=(0, 0, 0), frequency_penalty=0.6)) == 0
    assert sample_one(logits, row(output=(0,), frequency_penalty=0.6)) == 0
    assert sample_one(logits, row(output=(0, 0), frequency_penalty=0.6)) == 1


def test_presence_penalty_counts_a_token_once() -> None:
    assert sample_one([3.0, 2.0, 0.0], row(prompt=(0,), presence_penalty=2.0)) == 0
    assert sample_one([3.0, 2.0, 0.0], row(output=(0,), presence_penalty=2.0)) == 1
    assert sample_one([3.0, 2.0, 0.0], row(output=(0,) * 9, presence_penalty=0.6)) == 0


def test_penalties_come_after_the_bias_and_before_temperature() -> None:
    """(2 + 4) / 3 = 2 for the biased and repeated token 0; temperature 2 then halves every score."""
    made = row(prompt=(0,), logit_bias={0: 4.0}, repetition_penalty=3.0, temperature=2.0)
    rows = [replace(made, params=replace(made.params, seed=seed)) for seed in range(3000)]
    tokens = sample(torch.tensor([[2.0, 1.0, 0.0]] * len(rows)), rows, EOS)
    assert_fair(tokens, softmax([1.0, 0.5, 0.0]))


def test_tokens_beyond_the_vocabulary_in_prompt_and_output_are_ignored() -> None:
    strange = row(prompt=(500,), output=(600,), repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0)
    assert sample_one([0.0, 1.0, 0.5], strange) == 1


# --- what survives ---------------------------------------------------------------------------------------------

SCORES = st.lists(st.integers(-60, 0).map(lambda value: value / 2), min_size=1, max_size=40)


def reference_survivors(values: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition, by sorting everything: most probable first, of equals the lower id first."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[:top_k] if top_k else order
    if top_p < 1:
        total, mass, kept = math.fsum(math.exp(values[i]) for i in order), 0.0, 0
        while kept < len(order) and (kept == 0 or mass < top_p * total * (1 - 1e-12)):
            mass, kept = mass + math.exp(values[order[kept]]), kept + 1
        order = order[:kept]
    return sorted(i for i in order if min_p == 0 or math.exp(values[i]) >= min_p * (1 - 1e-12))


@settings(deadline=None)
@given(SCORES, st.integers(0, 50), st.sampled_from([1e-9, 0.1, 0.37, 0.5, 0.913, 0.99999]), st.floats(0, 0.7))
def test_survivors_equal_the_definition(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    values = [value - max(values) for value in values]
    found = survivors(np.array(values), top_k, top_p, min_p)
    expected = reference_survivors(values, top_k, top_p, min_p)
    # where the nucleus ends exactly on its limit, rounding may move the end by one token
    assert len(set(found.tolist()) ^ set(expected)) <= 1
    assert len(found) > 0
    assert found.tolist() == sorted(found.tolist())


@given(SCORES, st.integers(1, 50))
def test_exactly_k_tokens_survive_top_k_even_among_equals(values: list[float], top_k: int) -> None:
    values = [value - max(values) for value in values]
    assert survivors(np.array(values), top_k, 1.0, 0.0).tolist() == reference_survivors(values, top_k, 1.0, 0.0)


def test_a_flat_nucleus_is_cut_at_its_share() -> None:
    assert survivors(np.zeros(1000), 0, 0.25, 0.0).tolist() == list(range(250))


def test_a_nucleus_reaching_into_the_far_tail_is_complete() -> None:
    """Most of the mass lies in tokens each e^-13 as probable as the best: below what is looked at first."""
    scores = np.full(2_000_000, -13.0)
    scores[7] = 0.0
    weight = math.exp(-13.0)
    expected = math.ceil((0.75 * (1 + weight * (len(scores) - 1)) - 1) / weight) + 1
    assert abs(len(survivors(scores, 0, 0.75, 0.0)) - expected) <= 1


def test_top_p_applies_to_what_top_k_left() -> None:
    """Of the two left by top-k, the first holds 0.4 / 0.7 = 0.57 of the mass, though only 0.4 of all."""
    scores = np.log(np.array([0.4, 0.3, 0.3])) - math.log(0.4)
    assert survivors(scores, 2, 0.55, 0.0).tolist() == [0]
    assert survivors(scores, 0, 0.55, 0.0).tolist() == [0, 1]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-300}])
def test_settings_that_leave_one_token_equal_greedy(fields: dict[str, float]) -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [row(**({"temperature": 1.5, "seed": seed} | fields)) for seed in range(50)]
    assert sample(logits, rows, EOS) == logits.argmax(dim=-1).tolist()


# --- noise -----------------------------------------------------------------------------------------------------


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", written out in Python integers."""
    mask = (1 << 64) - 1
    for _ in range(10):
        product_0, product_1 = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (product_1 >> 64) ^ counter[1] ^ key[0],
            product_1 & mask,
            (product_0 >> 64) ^ counter[3] ^ key[1],
            product_0 & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


@given(st.integers(0, 2**64 - 1), st.integers(0, 127), st.integers(0, 2**32))
def test_noise_words_follow_the_documented_formula(seed: int, choice: int, position: int) -> None:
    expected = [philox_4x64_10([1 + i // 4, 0, 0, position], [seed, choice])[i % 4] for i in range(11)]
    assert noise_words(seed, choice, position, 11).tolist() == expected


def test_gumbel_noise_is_finite_and_rising_at_the_ends_of_the_word() -> None:
    noise = gumbel(np.array([0, 1 << 32, 1 << 63, (1 << 64) - (1 << 12) - 1, (1 << 64) - 1], dtype=np.uint64))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) > 0).all()


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.sampled_from([0.0, 0.5, 5.0, 50.0]))
def test_draw_equals_the_plain_gumbel_max(seed: int, spread: float) -> None:
    scores = np.random.default_rng(seed).standard_normal(300) * spread
    scores -= scores.max()
    words = noise_words(seed, 0, 0, 300)
    ids = np.arange(0, 300, 3)
    assert _draw(scores, ids, words) == ids[(scores + gumbel(words))[ids].argmax()]


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_tokens_follow_the_softmax_whichever_part_of_the_key_varies(varied: str) -> None:
    logits = [0.3, -1.0, 0.9, 0.0, 1.7, -0.2, 0.5, -2.0]
    draws = {
        "seed": [row(temperature=0.8, seed=seed) for seed in range(4000)],
        "choice": [row(temperature=0.8, seed=seed, choice=choice) for seed in range(40) for choice in range(100)],
        "position": [row(temperature=0.8, output=(0,) * position, seed=3) for position in range(4000)],
    }[varied]
    tokens = sample(torch.tensor([logits] * len(draws)), draws, EOS)
    assert_fair(tokens, softmax([value / 0.8 for value in logits]))


def test_consecutive_positions_and_choices_draw_independently() -> None:
    pairs: dict[str, list[SampleRow]] = {
        "position": [
            row(temperature=1.0, seed=seed, output=(0,) * position) for seed in range(2000) for position in (0, 1)
        ],
        "choice": [row(temperature=1.0, seed=seed, choice=choice) for seed in range(2000) for choice in (0, 1)],
        "seed": [row(temperature=1.0, seed=seed) for seed in range(4000)],
    }
    logits, single = [0.0, 0.5, -0.5], softmax([0.0, 0.5, -0.5])
    for draws in pairs.values():
        tokens = sample(torch.tensor([logits] * len(draws)), draws, EOS)
        joint = [3 * first + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
        assert_fair(joint, [a * b for a in single for b in single])


def test_filters_draw_from_the_renormalised_rest() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.06, 0.04)]
    for fields, left in (({"top_k": 3}, 3), ({"top_p": 0.85}, 3), ({"min_p": 0.12}, 4)):
        rows = [row(temperature=1.0, seed=seed, **fields) for seed in range(3000)]
        kept = [0.4, 0.3, 0.2, 0.06, 0.04][:left]
        tokens = sample(torch.tensor([logits] * len(rows)), rows, EOS)
        assert_fair(tokens, [p / sum(kept) for p in kept] + [0.0] * (5 - left))


# --- independence of the batch ---------------------------------------------------------------------------------


@st.composite
def sample_rows(draw: st.DrawFn) -> tuple[int, SampleRow]:
    """A seed for the logits, and a row with anything set, extremes included."""
    token = st.integers(0, VOCAB + 3)
    params = SamplingParams(
        max_tokens=100,
        seed=draw(st.integers(0, 2**64 - 1)),
        temperature=draw(st.sampled_from([0.0, 5e-324, 1e-4, 0.7, 1.0, 1e4])),
        top_k=draw(st.sampled_from([0, 1, 3, VOCAB, 10**6])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3, 5e-324])),
        min_p=draw(st.sampled_from([0.0, 0.05, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 1e4, 5e-324])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -1e4, 1e4])),
        presence_penalty=draw(st.sampled_from([0.0, -0.5, 1e4])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-1e4, -1.0, 2.0, 1e4]), max_size=4)),
        min_tokens=draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(token, max_size=VOCAB)),
    )
    prompt, output = draw(st.lists(token, min_size=1, max_size=6)), draw(st.lists(token, max_size=6))
    return draw(st.integers(0, 2**32)), SampleRow(params, prompt, output, draw(st.integers(0, 127)))


def logits_of(seeds: list[int]) -> torch.Tensor:
    made = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4 for seed in seeds]
    return torch.stack(made)


@settings(deadline=None, max_examples=200)
@given(st.lists(sample_rows(), min_size=1, max_size=6), st.data())
def test_tokens_do_not_depend_on_the_batch_they_are_sampled_in(
    drawn: list[tuple[int, SampleRow]], data: st.DataObject
) -> None:
    together = sample(logits_of([seed for seed, _ in drawn]), [one for _, one in drawn], EOS)
    assert all(0 <= token < VOCAB for token in together)
    order = data.draw(st.permutations(range(len(drawn))))
    part = order[: data.draw(st.integers(1, len(drawn)))]
    again = sample(logits_of([drawn[i][0] for i in part]), [drawn[i][1] for i in part], EOS)
    assert again == [together[i] for i in part]


def test_sampling_leaves_the_logits_untouched() -> None:
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    sample(logits, [row(temperature=1.0, repetition_penalty=2.0, logit_bias={1: 5.0})] * 4, EOS)
    assert torch.equal(logits, before)


def test_half_precision_logits_give_the_tokens_of_their_exact_values() -> None:
    logits = torch.randn(20, VOCAB).to(torch.bfloat16)
    rows = [row(temperature=1.0, seed=seed) for seed in range(20)]
    assert sample(logits, rows, EOS) == sample(logits.float(), rows, EOS)
