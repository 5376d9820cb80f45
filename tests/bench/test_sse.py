from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench import sse
from pdserve.bench.sse import EventTooLarge, SSEReader

# text without line ends: those are what separates lines
lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
data = st.lists(lines, min_size=1, max_size=3)
line_ends = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def encoded_streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A byte stream of events, some with comments and other fields, and the data it holds."""
    stream, expected = "", []
    for event in draw(st.lists(data, max_size=5)):
        end = draw(line_ends)
        noise = draw(
            st.sampled_from(["", f": a comment{end}", f"event: message{end}", f"id{end}", f": lonely{end}{end}"])
        )
        stream += noise + "".join(f"data: {line}{end}" for line in event) + end
        expected.append("\n".join(event))
    return stream.encode(), expected


def split_at(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:end] for start, end in pairwise(places)]


@given(encoded_streams(), st.lists(st.integers(0, 10_000), max_size=20))
def test_events_are_the_same_wherever_the_network_cuts_the_stream(
    encoded: tuple[bytes, list[str]], cuts: list[int]
) -> None:
    stream, expected = encoded
    reader = SSEReader()
    assert [event for part in split_at(stream, cuts) for event in reader.feed(part)] == expected


@given(encoded_streams())
def test_events_are_the_same_byte_by_byte(encoded: tuple[bytes, list[str]]) -> None:
    stream, expected = encoded
    reader = SSEReader()
    assert [event for index in range(len(stream)) for event in reader.feed(stream[index : index + 1])] == expected


def test_an_event_is_given_out_only_when_its_empty_line_has_come() -> None:
    reader = SSEReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\ndata: b\n\n") == ["a", "b"]


def test_only_one_space_after_the_colon_is_dropped() -> None:
    assert SSEReader().feed(b"data:a\n\ndata:  b\n\n") == ["a", " b"]


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    reader = SSEReader()
    reader.feed(b"data: " + b"x" * 50)
    with pytest.raises(EventTooLarge):
        reader.feed(b"x" * 60)


def test_an_endless_event_of_short_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    reader = SSEReader()
    for _ in range(10):
        assert reader.feed(b"data: 12345678\n") == []
    with pytest.raises(EventTooLarge):
        reader.feed(b"data: 12345678\n" * 5)
