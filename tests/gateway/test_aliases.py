"""Which model an alias chooses for whom."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.gateway.aliases import Alias, BadWeights, check_weights

USERS = [f"user:{i}" for i in range(4000)]


def chosen(**weights: int) -> dict[str, str]:
    alias = Alias("chat", weights)
    return {user: alias.choose(user) for user in USERS}


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 90, "b": 10}, {"a": 3, "b": 0, "c": 1}])
def test_each_model_gets_its_share_of_the_users(weights: dict[str, int]) -> None:
    counts = Counter(chosen(**weights).values())
    for model, weight in weights.items():
        share = weight / sum(weights.values())
        assert counts[model] / len(USERS) == pytest.approx(share, abs=0.03)
        assert weight or not counts[model]


def test_the_choice_is_the_same_every_time_and_differs_between_aliases() -> None:
    assert chosen(a=1, b=1) == chosen(a=1, b=1)
    other = Alias("beta", {"a": 1, "b": 1})
    agreeing = sum(other.choose(user) == model for user, model in chosen(a=1, b=1).items())
    assert agreeing / len(USERS) == pytest.approx(0.5, abs=0.03), "the first users of one test are not those of all"


def test_shifted_weights_move_users_one_way_only() -> None:
    before, after = chosen(a=95, b=5), chosen(a=3, b=1)
    moved = Counter((before[user], after[user]) for user in USERS if before[user] != after[user])
    assert moved.keys() == {("a", "b")}
    assert moved["a", "b"] / len(USERS) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ({"x": 1}, "'x'"),
        ({"a": -1}, "whole number"),
        ({"a": 1_000_001}, "whole number"),
        ({"a": "1"}, "whole number"),
        ({"a": 0}, "more than 0"),
        ({}, "more than 0"),
    ],
)
def test_weights_that_cannot_be_are_refused_in_words(weights: dict[str, object], word: str) -> None:
    with pytest.raises(BadWeights, match=word):
        check_weights(weights, {"a": None})
