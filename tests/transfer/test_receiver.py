"""A slab is taken exactly once, in order, whole and unharmed, or it is an error with a reason."""

import dataclasses

import pytest

from pdserve.kernels.slabs import checksum
from pdserve.transfer.errors import TransferError
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.messages import Handoff, Slab
from pdserve.transfer.receiver import Receiver

LAYOUT = KVLayout("f", "float32", (LayerShape(1, 2, 2), LayerShape(1, 2, 2)))
BYTES_PER_TOKEN = 16
SENDER = "prefill-0#00000000"
HANDOFF = Handoff("r", 1, 9, [5], 0.0)


def slab(layer: int, first: int, count: int, num_layers: int = 1) -> tuple[Slab, memoryview]:
    payload = memoryview(bytes(num_layers * count * BYTES_PER_TOKEN))
    return Slab("r", 1, 9, layer, first, count, checksum(payload), num_layers=num_layers), payload


@pytest.fixture
def receiver() -> Receiver:
    receiver = Receiver(LAYOUT)
    receiver.expect("r", 1, 9, SENDER, held=4, total=10)
    return receiver


def take(receiver: Receiver, layer: int, first: int, count: int, num_layers: int = 1) -> None:
    message, payload = slab(layer, first, count, num_layers)
    entry = receiver.find(message, SENDER)
    assert entry is not None
    receiver.check(entry, message, payload)
    receiver.taken(entry, message, payload.nbytes)


def test_complete_after_every_layer_is_full(receiver: Receiver) -> None:
    for layer in (0, 1):
        take(receiver, layer, 4, 3)
    for layer in (0, 1):
        take(receiver, layer, 7, 3)
    entry = receiver.find(HANDOFF, SENDER)
    assert entry is not None
    assert receiver.complete(entry) >= 0
    assert len(receiver) == 0


def test_a_slab_of_several_layers_is_the_next_piece_of_each(receiver: Receiver) -> None:
    take(receiver, 1, 4, 3)
    take(receiver, 0, 4, 3)
    take(receiver, 0, 7, 3, num_layers=2)
    entry = receiver.find(HANDOFF, SENDER)
    assert entry is not None
    assert entry.num_bytes == 12 * BYTES_PER_TOKEN
    receiver.complete(entry)


@pytest.mark.parametrize(("num_layers", "reason"), [(2, "gap"), (3, "bad_layer")])
def test_one_layer_that_is_elsewhere_spoils_the_slab(receiver: Receiver, num_layers: int, reason: str) -> None:
    take(receiver, 1, 4, 3)
    with pytest.raises(TransferError, match=reason):
        take(receiver, 0, 4, 3, num_layers)


@pytest.mark.parametrize(
    ("layer", "first", "count", "reason"),
    [(0, 5, 2, "gap"), (0, 0, 4, "gap"), (0, 4, 7, "overrun"), (5, 4, 1, "bad_layer")],
)
def test_wrong_place_is_an_error(receiver: Receiver, layer: int, first: int, count: int, reason: str) -> None:
    message, payload = slab(layer, first, count)
    entry = receiver.find(message, SENDER)
    assert entry is not None
    with pytest.raises(TransferError) as caught:
        receiver.check(entry, message, payload)
    assert caught.value.reason == reason


def test_the_same_slab_twice_is_an_error(receiver: Receiver) -> None:
    take(receiver, 0, 4, 3)
    with pytest.raises(TransferError, match="gap"):
        take(receiver, 0, 4, 3)


def test_a_short_payload_is_an_error(receiver: Receiver) -> None:
    message, payload = slab(0, 4, 3)
    entry = receiver.find(message, SENDER)
    assert entry is not None
    with pytest.raises(TransferError, match="bad_size"):
        receiver.check(entry, message, payload[:-1])


def test_handoff_before_the_last_slab_is_an_error(receiver: Receiver) -> None:
    take(receiver, 0, 4, 6)
    entry = receiver.find(HANDOFF, SENDER)
    assert entry is not None
    with pytest.raises(TransferError, match="incomplete"):
        receiver.complete(entry)


@pytest.mark.parametrize("change", [{"attempt": 2}, {"reservation": 8}, {"request": "s"}])
def test_slabs_of_other_attempts_and_reservations_are_unknown(receiver: Receiver, change: dict[str, object]) -> None:
    message = dataclasses.replace(slab(0, 4, 3)[0], **change)
    assert receiver.find(message, SENDER) is None


def test_another_sender_is_unknown(receiver: Receiver) -> None:
    assert receiver.find(slab(0, 4, 3)[0], "prefill-0#11111111") is None


def test_nothing_is_taken_after_the_reservation_ended(receiver: Receiver) -> None:
    receiver.forget("r", 1)
    assert receiver.find(slab(0, 4, 3)[0], SENDER) is None
