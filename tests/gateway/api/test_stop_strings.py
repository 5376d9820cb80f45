"""Stop strings: cut as if the whole text were known, and never a character of one shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gateway.api.stop_strings import StopScanner
from pdserve.gateway.api.text import ChoiceText, TextOptions, Tokenizer


def naive_cut(text: str, stops: Sequence[str], include_stop: bool, floor: int = 0) -> tuple[str, str | None]:
    """The whole text, cut at the first stop string that ends behind `floor`."""
    found = [
        (start, len(stop))
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > floor
    ]
    if not found:
        return text, None
    start, length = min(found)
    return text[: start + length if include_stop else start], text[start : start + length]


def choice_text(tokenizer: Tokenizer, ids: Sequence[int], options: TextOptions) -> tuple[str, str | None, int]:
    """All that was shown, the stop string, and how many tokens it took; the last id ends by length."""
    choice, shown = ChoiceText(tokenizer, options), ""
    for index, token in enumerate(ids):
        shown += choice.push(token, "length" if index == len(ids) - 1 else "")
        if choice.stopped is not None:
            break
    return shown, choice.stopped, choice.num_tokens


ALPHABET = "abc"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


@given(pieces=st.lists(st.text(ALPHABET, max_size=6)), stops=STOPS, include=st.booleans())
@settings(max_examples=500)
def test_stop_strings_cut_as_if_the_whole_text_were_known(pieces: list[str], stops: list[str], include: bool) -> None:
    expected, stop = naive_cut("".join(pieces), stops, include)
    scanner, shown = StopScanner(stops, include), ""
    for piece in [*pieces, None]:
        shown += scanner.feed(piece or "", final=piece is None)
        assert expected.startswith(shown), "nothing behind the cut is ever shown"
        if scanner.stopped is not None:
            break
    assert (shown, scanner.stopped) == (expected, stop)


@given(pieces=st.lists(st.text(ALPHABET, max_size=6)), stops=STOPS, include=st.booleans(), barred=st.integers(0, 6))
@settings(max_examples=500)
def test_stop_strings_that_end_in_barred_pieces_do_not_count(
    pieces: list[str], stops: list[str], include: bool, barred: int
) -> None:
    floor = len("".join(pieces[:barred]))
    expected = naive_cut("".join(pieces), stops, include, floor)
    scanner, shown = StopScanner(stops, include), ""
    for index, piece in enumerate([*pieces, ""]):
        shown += scanner.feed(piece, final=index == len(pieces), may_stop=index >= barred)
        if scanner.stopped is not None:
            break
    assert (shown, scanner.stopped) == expected


@given(pieces=st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=30), stops=STOPS)
def test_what_is_held_back_is_shorter_than_the_longest_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner, taken, shown = StopScanner(stops, False), 0, 0
    for piece in pieces:
        taken += len(piece)
        shown += len(scanner.feed(piece))
        if scanner.stopped is not None:
            return
        assert taken - shown < max(map(len, stops))


def test_an_earlier_stop_string_that_may_still_complete_is_waited_for() -> None:
    scanner = StopScanner(["abcd", "c"], False)
    assert [scanner.feed(char) for char in "xabc"] == ["x", "", "", ""]
    assert (scanner.feed("d"), scanner.stopped) == ("", "abcd")
    scanner = StopScanner(["abcd", "c"], False)
    assert [scanner.feed(char) for char in "xabce"] == ["x", "", "", "", "ab"]
    assert scanner.stopped == "c"


def test_a_complete_stop_string_does_not_wait_for_a_longer_one_at_the_same_place() -> None:
    scanner = StopScanner(["ab", "abc"], True)
    assert (scanner.feed("xab"), scanner.stopped) == ("xab", "ab")


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 8))
@settings(max_examples=300)
@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
def test_choice_text_equals_the_whole_decoding_cut_at_the_stop(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=25))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    spans = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4))
    stops = [whole[a : a + n] or "x" for a, n in data.draw(st.lists(spans, max_size=3))]
    stream = tokenizer.incremental(skip_special_tokens=True)
    by_pieces = [stream.push(token) for token in ids]
    floor = len("".join(by_pieces[:min_tokens])) if min_tokens < len(ids) else len(whole)
    expected, stop = naive_cut(whole, stops, include, floor)
    options = TextOptions(tuple(stops), include_stop=include, min_tokens=min_tokens)
    shown, stopped, num_tokens = choice_text(tokenizer, ids, options)
    assert (shown, stopped) == (expected, stop)
    assert stop is not None or num_tokens == len(ids)


def test_a_stop_string_completed_by_the_last_token_still_stops(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("go END")
    assert choice_text(tokenizer, ids, TextOptions(stop=("END",))) == ("go ", "END", len(ids))
