"""The paged cache: slabs in and out by token range, and how many blocks a worker may have."""

from __future__ import annotations

import argparse
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine import kv_cache
from pdserve.engine.kv_cache import KVCache, parse_size, plan_num_blocks
from pdserve.engine.setup import add_engine_arguments, engine_config
from pdserve.kernels.slabs import checksum
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.layout import KVLayout, LayerShape

LAYOUT = KVLayout(
    fingerprint="f", dtype="float32", layers=(LayerShape(2, 4, 4), LayerShape(1, 6, 3), LayerShape(3, 5, 2))
)
GIB = 1024**3


def filled(block_size: int, num_blocks: int = 30, dtype: str = "float32") -> KVCache:
    cache = KVCache(KVLayout(fingerprint="f", dtype=dtype, layers=LAYOUT.layers), num_blocks, block_size)
    generator = torch.Generator().manual_seed(block_size)
    for tensor in planes(cache):
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128, generator=generator)
        else:
            tensor.normal_(generator=generator)
    return cache


def planes(cache: KVCache) -> list[Tensor]:
    """Everything that is kept of a token."""
    return [*cache.keys, *cache.values, *(plane for scales in cache.scales for plane in scales or ())]


@given(
    sizes=st.tuples(st.sampled_from([1, 3, 16, 32]), st.sampled_from([1, 3, 16, 32])),
    first_token=st.integers(0, 20),
    num_tokens=st.integers(1, 25),
    layers=st.sampled_from([range(1), range(1, 2), range(2, 3), range(2), range(3)]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
)
def test_a_token_range_survives_the_trip_between_block_sizes(
    sizes: tuple[int, int], first_token: int, num_tokens: int, layers: range, dtype: str
) -> None:
    source, target = filled(sizes[0], 60, dtype), filled(sizes[1], 60, dtype)
    blocks = [random.Random(size).sample(range(60), -(-(first_token + num_tokens) // size)) for size in sizes]
    slab, total = source.gather(layers, blocks[0], first_token, num_tokens)
    assert total == checksum(slab)
    assert slab.nbytes == num_tokens * source.layout.bytes_per_token_of(layers)
    before = [tensor.clone() for tensor in planes(target)]
    assert target.scatter(layers, blocks[1], first_token, num_tokens, slab) == total
    assert bytes(target.gather(layers, blocks[1], first_token, num_tokens)[0]) == bytes(slab)
    room = bytearray(slab.nbytes)
    assert source.gather(layers, blocks[0], first_token, num_tokens, memoryview(room))[0].obj is room
    assert bytes(room) == bytes(slab)
    changed = sum(
        int((now != then).flatten(2).any(2).sum()) for now, then in zip(planes(target), before, strict=True)
    )
    kept = (4 if dtype == "int8" else 2) * len(layers)
    assert changed <= kept * num_tokens, "tokens outside of the range were touched"


def test_a_slab_holds_the_tokens_of_the_range_in_order() -> None:
    cache = filled(3)
    slab, _ = cache.gather(range(1, 2), [7, 2, 9], first_token=2, num_tokens=5)
    floats = torch.frombuffer(bytearray(slab), dtype=torch.float32)
    tokens = [(7, 2), (2, 0), (2, 1), (2, 2), (9, 0)]
    keys = torch.stack([cache.keys[1][block, offset] for block, offset in tokens])
    values = torch.stack([cache.values[1][block, offset] for block, offset in tokens])
    assert torch.equal(floats, torch.cat([keys.flatten(), values.flatten()]))


def test_a_copied_block_equals_its_source_in_every_layer_and_touches_no_other() -> None:
    cache = filled(4, num_blocks=5)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_block(1, 3)
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor[3], old[1])
        assert torch.equal(tensor[[0, 1, 2, 4]], old[[0, 1, 2, 4]])


def test_a_range_past_the_block_table_is_a_bug_not_a_read() -> None:
    with pytest.raises(AssertionError, match="do not cover"):
        filled(4).gather(range(1), [1, 2], first_token=4, num_tokens=5)


def test_int8_makes_more_blocks_of_the_same_memory_and_its_tensors_are_as_large_as_the_layout_says() -> None:
    layout = KVLayout(fingerprint="f", dtype="int8", layers=LAYOUT.layers)
    assert layout.token_bytes(1) == (6, 3, 4, 4)
    memory_bytes = 100 * 16 * LAYOUT.bytes_per_token
    num_blocks = plan_num_blocks(layout, 16, None, memory_bytes, "cpu")
    assert num_blocks == memory_bytes // (16 * layout.bytes_per_token) > 150
    assert sum(plane.nbytes for plane in planes(filled(16, 30, "int8"))) == 31 * 16 * layout.bytes_per_token


@pytest.mark.parametrize("flags", [["--dtype", "bfloat16"], ["--device", "cuda"]])
def test_int8_where_it_cannot_be_is_refused_by_flag(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.set_defaults(trust_remote_code=False)
    add_engine_arguments(parser)
    assert engine_config(parser.parse_args(["--model", "m", "--kv-cache-dtype", "int8"])).kv_cache_dtype == "int8"
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 needs --device cpu and --dtype float32"):
        engine_config(parser.parse_args(["--model", "m", "--kv-cache-dtype", "int8", *flags]))


def test_a_copied_int8_block_brings_its_scales() -> None:
    cache = filled(3, 5, "int8")
    cache.copy_block(1, 3)
    assert all(torch.equal(plane[3], plane[1]) for plane in planes(cache))


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1048576), ("512M", 512 << 20), ("2G", 2 * GIB), ("1.5GiB", 3 * GIB // 2), ("64kb", 65536)],
)
def test_sizes_are_read_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "2X", "0", "0.0001K", "2 G G", "1e9", "nan", "٣G"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


@pytest.fixture
def one_gib(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda device: GIB)
    return GIB


def test_by_default_the_cache_takes_a_share_of_what_is_available(one_gib: int) -> None:
    blocks = plan_num_blocks(LAYOUT, 16, None, None, "cpu")
    assert blocks == int(one_gib * 0.15) // (16 * LAYOUT.bytes_per_token)


def test_by_default_the_cache_never_takes_more_than_2_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda device: 1000 * GIB)
    assert plan_num_blocks(LAYOUT, 16, None, None, "cpu") == 2 * GIB // (16 * LAYOUT.bytes_per_token)


def test_an_explicit_size_is_taken_as_it_is(one_gib: int) -> None:
    assert plan_num_blocks(LAYOUT, 16, 77, None, "cpu") == 77
    assert plan_num_blocks(LAYOUT, 16, None, 100 * 16 * LAYOUT.bytes_per_token + 5, "cpu") == 100


def test_a_cache_past_the_available_memory_is_refused_naming_both_numbers(one_gib: int) -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory needs 3\.00 GiB for KV, but 1\.00 GiB is available"):
        plan_num_blocks(LAYOUT, 16, None, 3 * GIB, "cpu")
    with pytest.raises(ConfigError, match=r"--kv-blocks 10000000 needs .* GiB for KV, but 1\.00 GiB is available"):
        plan_num_blocks(LAYOUT, 16, 10_000_000, None, "cpu")


@pytest.mark.parametrize(("kv_blocks", "kv_memory"), [(0, None), (-3, None), (None, 100), (5, 10**9)])
def test_a_size_without_room_for_a_block_or_given_twice_is_refused(
    one_gib: int, kv_blocks: int | None, kv_memory: int | None
) -> None:
    with pytest.raises(ConfigError):
        plan_num_blocks(LAYOUT, 16, kv_blocks, kv_memory, "cpu")
