"""Both ends of a link, over real sockets: layers leave in slabs of decent size, and all of it arrives."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.transfer.channel import STRANGER_FRAME_BYTES
from pdserve.transfer.links import LinkMode
from pdserve.transfer.messages import Gone, Slab
from pdserve.transfer.offers import MAX_POSITION, RingSpan
from pdserve.transfer.sender import FRAME_BYTES, Outgoing
from tests.decode.link_rig import LAYER_BYTES, LAYOUT, NUM_LAYERS, PREFILL, TABLE, TOKENS, pair, random_cache, ship


@pytest.mark.parametrize(
    ("mode", "ring_bytes", "expected"),
    [
        ("shm", 1 << 20, [(0, 6)]),
        ("shm", 8 * 2 * LAYER_BYTES, [(0, 2), (2, 2), (4, 2)]),
        ("shm", 8 * LAYER_BYTES, [(layer, 1) for layer in range(6)]),
        ("shm", LAYER_BYTES // 2, [(layer, 1) for layer in range(6)]),  # which go beside it
        ("zmq", 1 << 20, [(0, 6)]),
    ],
)
def test_layers_leave_together_as_far_as_the_ring_is_large(
    tmp_path: Path, mode: LinkMode, ring_bytes: int, expected: list[tuple[int, int]]
) -> None:
    assert FRAME_BYTES > NUM_LAYERS * LAYER_BYTES
    with pair(tmp_path, mode, ring_bytes) as both:
        ship(both.link, TOKENS)
        *slabs, _ = both.take()
        assert [(s.layer, s.num_layers) for s in slabs if isinstance(s, Slab)] == expected
        assert both.link.bytes_sent == TOKENS * LAYOUT.bytes_per_token


@pytest.mark.parametrize("first", ["bulk", "control"])
def test_the_very_first_slab_may_be_large_whichever_hello_came_first(tmp_path: Path, first: str) -> None:
    with pair(tmp_path, "zmq", 1 << 20, first) as both:
        both.link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0), memoryview(bytes(STRANGER_FRAME_BYTES + 1)))
        both.until(lambda: bool([*both.intake.poll_bulk(1 << 30)]), "it is here")


def test_every_chunk_ends_with_its_last_layer(tmp_path: Path) -> None:
    with pair(tmp_path, "shm", 8 * 2 * LAYER_BYTES) as both:
        ship(both.link, 60, 61, TOKENS)
        *slabs, _ = both.take()
        places = [(s.first_token, s.num_tokens, s.layer, s.num_layers) for s in slabs if isinstance(s, Slab)]
        assert places == [(0, 60, 0, 4), (0, 60, 4, 2), (60, 1, 0, 6), (61, 39, 0, 6)]


def test_what_decode_holds_already_is_not_sent(tmp_path: Path) -> None:
    with pair(tmp_path, "shm", 1 << 20) as both:
        outgoing = Outgoing("r", 1, 9, 50, both.link, LAYOUT)
        for layer in range(NUM_LAYERS):
            outgoing.ship(random_cache(1), layer, TABLE, 40)
        assert both.link.bytes_sent == 0
        for layer in range(NUM_LAYERS):
            outgoing.ship(random_cache(1), layer, TABLE, 60)
        assert both.link.bytes_sent == 10 * LAYOUT.bytes_per_token


def test_a_slab_goes_where_decode_has_just_read_and_what_else_it_said_is_not_lost(tmp_path: Path) -> None:
    """In the middle of a step nobody polls the link."""
    with pair(tmp_path, "shm", 1 << 20) as both:
        before = both.link.room_in_ring(LAYER_BYTES)
        assert before is not None
        both.link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, before[0]), before[1])
        both.until(lambda: bool([*both.intake.poll_bulk(1 << 30)]), "it is here")
        both.intake.send_credits()
        assert both.link.sockets[1].poll(10_000), "the credit is here"
        after = both.link.room_in_ring(LAYER_BYTES)
        assert after is not None
        assert before[0].position % (1 << 20) == after[0].position % (1 << 20) == 0
        both.intake.tell_gone(f"{PREFILL}/1", "r", 1)
        assert both.link.sockets[1].poll(10_000), "it is here"
        assert both.link.room_in_ring(1) is not None
        assert [*both.link.poll()] == [Gone("r", 1)]


def test_positions_past_all_reason_do_not_end_the_receiver(tmp_path: Path) -> None:
    with pair(tmp_path, "shm", 1 << 20) as both:
        for num_bytes in (MAX_POSITION, 1):
            span = RingSpan(MAX_POSITION, num_bytes)
            both.link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, span), memoryview(b""))
        seen: list[object] = []

        def all_here() -> bool:
            seen.extend(both.intake.poll_bulk(1 << 30))
            both.intake.send_credits()
            return len(seen) + both.counts.dropped["bad_span"] == 2

        both.until(all_here, "both are looked at")
        assert len(seen) == 1, "only one byte may lie there"
        both.counts.dropped.clear()
