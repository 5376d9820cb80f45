"""When a choice is over: every precedence case of EOS, stop ids, min_tokens and max_tokens."""

import itertools

import pytest

from pdserve.engine.request import finish_reason
from pdserve.transfer.sampling_params import SamplingParams

EOS = frozenset({2, 7})
STOP = 5
PLAIN = 9


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "seed": 0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("eos", sorted(EOS))
def test_any_eos_token_stops(eos: int) -> None:
    assert finish_reason(params(), [PLAIN, eos], EOS) == "stop"


def test_a_stop_token_id_stops_and_a_plain_token_goes_on() -> None:
    assert finish_reason(params(stop_token_ids=[STOP]), [PLAIN, STOP], EOS) == "stop"
    assert finish_reason(params(stop_token_ids=[STOP]), [PLAIN, PLAIN], EOS) == ""


def test_only_the_newest_token_counts() -> None:
    assert finish_reason(params(stop_token_ids=[STOP]), [2, STOP, PLAIN], EOS) == ""


def test_nothing_is_over_before_the_first_token() -> None:
    assert finish_reason(params(), [], EOS) == ""


def test_max_tokens_ends_with_length_exactly_there() -> None:
    assert finish_reason(params(max_tokens=3), [PLAIN] * 2, EOS) == ""
    assert finish_reason(params(max_tokens=3), [PLAIN] * 3, EOS) == "length"


def test_stop_wins_over_length_on_the_last_allowed_token() -> None:
    assert finish_reason(params(max_tokens=2), [PLAIN, 2], EOS) == "stop"
    assert finish_reason(params(max_tokens=2, stop_token_ids=[STOP]), [PLAIN, STOP], EOS) == "stop"


def test_ignore_eos_goes_on_past_eos_until_length() -> None:
    ignoring = params(max_tokens=3, ignore_eos=True)
    assert finish_reason(ignoring, [PLAIN, 2], EOS) == ""
    assert finish_reason(ignoring, [PLAIN, PLAIN, 2], EOS) == "length"


def test_an_eos_named_as_stop_token_stops_even_with_ignore_eos() -> None:
    assert finish_reason(params(ignore_eos=True, stop_token_ids=[2]), [2], EOS) == "stop"


@pytest.mark.parametrize("token", [2, STOP])
def test_nothing_stops_before_min_tokens(token: int) -> None:
    patient = params(min_tokens=3, stop_token_ids=[STOP])
    assert finish_reason(patient, [PLAIN, token], EOS) == ""
    assert finish_reason(patient, [PLAIN, PLAIN, token], EOS) == "stop"


def test_a_model_without_eos_runs_to_length() -> None:
    assert finish_reason(params(max_tokens=2), [2], frozenset()) == ""
    assert finish_reason(params(max_tokens=2), [2, 2], frozenset()) == "length"


def test_every_combination_has_the_one_reason_its_rules_give() -> None:
    """The rules once more, as a table: stop needs a stopping token and min_tokens; else length; else nothing."""
    tokens, lengths = (PLAIN, 2, STOP), (1, 2, 3, 4)
    combinations = itertools.product(tokens, lengths, (2, 4), (0, 2, 3), (False, True), ([], [STOP], [2]))
    for token, length, maximum, minimum, ignore, stops in combinations:
        stops_here = {PLAIN: False, 2: not ignore or stops == [2], STOP: stops == [STOP]}[token]
        expected = "stop" if stops_here and length >= minimum else "length" if length >= maximum else ""
        given = params(max_tokens=maximum, min_tokens=minimum, ignore_eos=ignore, stop_token_ids=stops)
        assert finish_reason(given, [PLAIN] * (length - 1) + [token], EOS) == expected, given
