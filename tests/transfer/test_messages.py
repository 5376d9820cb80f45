"""What is not a valid message is an error with a reason, and never anything else."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.transfer.codec import SCHEMA_VERSION, SEAL_BYTES, decode, encode, seal
from pdserve.transfer.errors import LayoutMismatch, ProtocolError
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.messages import (
    Cancel,
    Handoff,
    Register,
    Reserve,
    Slab,
    Tokens,
)
from pdserve.transfer.sampling_params import SamplingParams

LAYOUT = KVLayout("f" * 64, "float32", (LayerShape(3, 64, 64), LayerShape(3, 64, 32)))
PARAMS = SamplingParams(max_tokens=5, seed=2**64 - 1, logit_bias={7: -1.5})
EXAMPLES = [
    Register("d#00000000", "decode", "m", LAYOUT, "h", "ipc://a", "ipc://b", ["zmq"], 16, 10, 100, 4, 1),
    Reserve("r", 1, [1, 2], [[], [3]], [False, True], PARAMS, "p#00000000", "auto", "", "salt", -3, 1.5),
    Tokens([("r", 1, 0, 4, 99, "stop")]),
    Slab("r", 1, 7, 0, 16, 4, 2**64 - 1),
    Handoff("r", 1, 7, [3], 0.25),
    Cancel("r", 2),
    Cancel("r", 2, 1),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(frame: bytes) -> None:
    for harmed in (frame, seal(frame)):
        with pytest.raises(ProtocolError):
            decode(harmed)


@given(st.sampled_from(EXAMPLES), st.data())
def test_one_flipped_bit_is_a_protocol_error(message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ProtocolError) as caught:
        decode(bytes(frame))
    assert caught.value.reason == "checksum"


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_field_of_any_other_value_is_valid_or_a_protocol_error(message, data: st.DataObject) -> None:
    body = msgpack.unpackb(encode(message)[:-SEAL_BYTES], strict_map_key=False)
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = data.draw(json_like)
    frame = seal(msgpack.packb(body))
    try:
        decode(frame)
    except ProtocolError as error:
        reason = error.reason
    else:
        reason = ""
    assert reason in {"", "malformed", "version", "unknown_message", "invalid_field"}


@pytest.mark.parametrize(
    "change", [{"extra": 1}, {"attempt": 0}, {"attempt": -1}, {"request": ""}, {"request": "x" * 65}]
)
def test_unknown_and_absurd_fields_are_refused(change: dict[str, object]) -> None:
    body = {"v": SCHEMA_VERSION, "t": "Cancel", "request": "r", "attempt": 1, "choice": None, **change}
    with pytest.raises(ProtocolError) as caught:
        decode(seal(msgpack.packb(body)))
    assert caught.value.reason == "invalid_field"
    assert next(iter(change)) in str(caught.value)


def test_another_schema_version_is_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(seal(msgpack.packb({"v": SCHEMA_VERSION + 1, "t": "Cancel", "request": "r", "attempt": 1})))
    assert caught.value.reason == "version"


def test_deeply_nested_input_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode(seal(b"\x91" * 100_000 + b"\xc0"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "float16"}, "dtype float32 != float16"),
        ({"fingerprint": "e" * 64}, "fingerprint"),
        ({"quantization": "int4"}, "quantization none != int4"),
        ({"layers": (LayerShape(3, 64, 64),)}, "layers 2 != 1"),
        ({"layers": (LayerShape(3, 64, 64), LayerShape(3, 64, 64))}, "layer 1 shape"),
    ],
)
def test_layout_mismatch_names_the_field_and_both_workers(change: dict[str, object], named: str) -> None:
    other = KVLayout(**{"fingerprint": LAYOUT.fingerprint, "dtype": "float32", "layers": LAYOUT.layers, **change})
    with pytest.raises(LayoutMismatch, match=named) as caught:
        LAYOUT.require_equal(other, "decode-0", "prefill-0")
    assert "decode-0" in str(caught.value)
    assert "prefill-0" in str(caught.value)


def test_bytes_per_token_sum_over_layers() -> None:
    assert LAYOUT.bytes_per_token == 4 * (3 * 128 + 3 * 96)
