"""A slab that was harmed on its way is an error, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.errors import TransferError
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.messages import Slab
from pdserve.transfer.slab import store_slab

BLOCKS = [5, 1, 3]
TOKENS = 37
HARMS: dict[str, Callable[[bytearray], object]] = {
    "a flipped bit": lambda b: b.__setitem__(17, b[17] ^ 4),
    "a flipped bit in the last byte": lambda b: b.__setitem__(-1, b[-1] ^ 128),
    "two words swapped": lambda b: b.__setitem__(slice(0, 128), b[64:128] + b[:64]),
    "two blocks swapped": lambda b: b.__setitem__(slice(0, 2048), b[1024:2048] + b[:1024]),
    "moved by a byte": lambda b: b.__setitem__(slice(0, None), b[1:] + b[:1]),
    "nothing but zeros": lambda b: b.__setitem__(slice(0, None), bytes(len(b))),
    "zeros from the middle on": lambda b: b.__setitem__(slice(len(b) // 2, None), bytes(len(b) - len(b) // 2)),
}


def cache(dtype: str) -> KVCache:
    made = KVCache(KVLayout("f", dtype, (LayerShape(3, 5, 7), LayerShape(2, 16, 16))), 6, 16)
    generator = torch.Generator().manual_seed(1)
    for plane in (*made.keys, *made.values):
        plane.copy_(torch.randint(-100, 100, plane.shape, generator=generator))
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2)])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_harm_on_the_way_is_an_error(dtype: str, layers: range, harm: Callable[[bytearray], object]) -> None:
    payload, total = cache(dtype).gather(layers, BLOCKS, 2, TOKENS)
    slab = Slab("r", 1, 1, layers.start, 2, TOKENS, total, num_layers=len(layers))
    target = cache(dtype)
    store_slab(target, slab, BLOCKS, payload)
    harmed = bytearray(payload)
    harm(harmed)
    with pytest.raises(TransferError, match="bad_checksum"):
        store_slab(target, slab, BLOCKS, memoryview(harmed))


def test_the_few_bytes_of_a_tiny_slab_are_summed_too() -> None:
    tiny = KVCache(KVLayout("f", "int8", (LayerShape(1, 1, 1),)), 2, 4)
    payload, total = tiny.gather(range(1), [1], 0, 1)
    assert payload.nbytes == 10
    with pytest.raises(TransferError, match="bad_checksum"):
        store_slab(tiny, Slab("r", 1, 1, 0, 0, 1, total), [0], memoryview(b"\x01" + bytes(9)))
