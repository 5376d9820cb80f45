from __future__ import annotations

from pdserve.gateway.choice import MAX_EARLY_TOKENS, ChoiceState, Taken


def test_early_tokens_wait_and_repeated_ones_are_not_kept() -> None:
    choice = ChoiceState()
    assert choice.note(1, Taken(11, ""))
    assert choice.next() is None
    assert choice.note(0, Taken(10, ""))
    taken = []
    while (following := choice.next()) is not None:
        taken.append(following)
        choice.accepted.append(following.token)
    assert taken == [Taken(10, ""), Taken(11, "")]
    assert choice.note(0, Taken(99, ""))
    assert choice.early == {}


def test_early_tokens_are_bounded() -> None:
    choice = ChoiceState()
    assert all(choice.note(index, Taken(1, "")) for index in range(1, MAX_EARLY_TOKENS + 1))
    assert not choice.note(MAX_EARLY_TOKENS + 1, Taken(1, ""))
