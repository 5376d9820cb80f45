"""Slabs go in and out of caches of any block size without a changed byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels.cache_ops import gather, scatter, write_kv


def caches(num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, block_size, 3)
    return torch.zeros(*shape, 5, dtype=dtype), torch.zeros(*shape, 7, dtype=dtype)


def as_payload(slab: Tensor) -> memoryview:
    return memoryview(slab.numpy())


def gathered(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    token_bytes = (k_cache[0, 0].numel() + v_cache[0, 0].numel()) * k_cache.element_size()
    slab = torch.empty(slots.numel() * token_bytes, dtype=torch.uint8)
    gather(k_cache, v_cache, slots, slab)
    return slab


def test_written_tokens_are_found_at_their_slots_and_nowhere_else() -> None:
    k_cache, v_cache = caches(4, 3)
    slots = torch.tensor([7, 0, 11])
    k, v = torch.randn(3, 3, 5), torch.randn(3, 3, 7)
    write_kv(k_cache, v_cache, k, v, slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(k_cache[slot // 3, slot % 3], k[token])
        assert torch.equal(v_cache[slot // 3, slot % 3], v[token])
    assert int(k_cache.flatten(2).any(2).sum()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_may_lie_in_any_order_in_memory_when_written(dtype: torch.dtype) -> None:
    slots = torch.tensor([7, 0, 11])
    k, v = torch.randn(3, 3, 5).to(dtype), torch.randn(3, 3, 7).to(dtype)
    wide = torch.cat([k, torch.zeros(3, 4, 5, dtype=dtype)], dim=1)
    expected = caches(4, 3, dtype)
    write_kv(*expected, k, v, slots)
    for other in (wide[:, :3], k.transpose(0, 1).contiguous().transpose(0, 1)):
        found = caches(4, 3, dtype)
        write_kv(*found, other, v, slots)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_a_slab_is_all_keys_then_all_values() -> None:
    k_cache, v_cache = caches(4, 2)
    slots = torch.tensor([5, 2, 3])
    k, v = torch.randn(3, 3, 5), torch.randn(3, 3, 7)
    write_kv(k_cache, v_cache, k, v, slots)
    assert bytes(as_payload(gathered(k_cache, v_cache, slots))) == k.numpy().tobytes() + v.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(data=st.data())
def test_a_slab_passes_between_caches_of_different_block_sizes(dtype: torch.dtype, data: st.DataObject) -> None:
    from_size, to_size = (data.draw(st.sampled_from([1, 3, 16, 32])) for _ in range(2))
    num_tokens = data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(num_tokens)
    sides = []
    for block_size in (from_size, to_size):
        k_cache, v_cache = caches(-(-num_tokens // block_size) + 2, block_size, dtype)
        order = torch.randperm(k_cache.shape[0] * block_size, generator=generator)
        sides.append((k_cache, v_cache, order[:num_tokens]))
    source, target = sides
    source[0].normal_(generator=generator)
    source[1].normal_(generator=generator)
    slab = gathered(*source)
    scatter(*target, as_payload(slab))
    assert torch.equal(gathered(*target), slab)


def test_a_read_only_payload_is_accepted_without_warning(recwarn: pytest.WarningsRecorder) -> None:
    k_cache, v_cache = caches(2, 4)
    slots = torch.tensor([1, 6])
    payload = torch.randn(2 * 3 * (5 + 7)).numpy().tobytes()
    scatter(k_cache, v_cache, slots, memoryview(payload).toreadonly())
    assert bytes(as_payload(gathered(k_cache, v_cache, slots))) == payload
    assert not recwarn.list


def test_a_gathered_slab_does_not_follow_later_writes() -> None:
    k_cache, v_cache = caches(2, 4)
    slots = torch.tensor([0, 1])
    slab = gathered(k_cache, v_cache, slots)
    before = slab.clone()
    k_cache.fill_(1.0)
    assert torch.equal(slab, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots",
    [
        [4, 5, 6, 7, 12, 13, 14, 15, 0, 1, 2, 3],
        [6, 7, 12, 13],
        [3, 2, 1, 0],
        [0, 1, 3, 4, 6, 5, 7],
        [9],
        list(range(16)),
    ],
)
def test_slots_that_follow_each_other_are_copied_as_those_that_do_not(slots: list[int], dtype: torch.dtype) -> None:
    k_cache, v_cache = (torch.randn_like(cache) for cache in caches(4, 4, dtype))
    slab = gathered(k_cache, v_cache, torch.tensor(slots))
    k, v = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
    assert bytes(as_payload(slab)) == b"".join(bytes(part.contiguous().view(torch.uint8).numpy()) for part in (k, v))
    found, expected = caches(4, 4, dtype), caches(4, 4, dtype)
    scatter(*found, torch.tensor(slots), as_payload(slab))
    for cache, part in zip(expected, (k, v), strict=True):
        cache.flatten(0, 1)[slots] = part
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
