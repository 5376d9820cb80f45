"""Kernels with helper threads: the same bits whatever their number, also while it changes, and after a fork."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention_native import attend_in_c, native_step, paged_layer
from pdserve.kernels.decoder_layer import DecoderLayer, GatedMLP, LayerWeights, Norm, Projection
from pdserve.kernels.pages import Pages
from pdserve.kernels.strips import StripWeight
from pdserve.kernels.threads import MOST_HELPERS, helped_seconds, set_helpers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 72, 6, 2, 12, 165


@pytest.fixture(autouse=True)
def alone_afterwards(library: ctypes.CDLL) -> Iterator[None]:
    yield
    set_helpers(library, [])


def cores(count: int) -> list[int]:
    """That many cores this process may use, the same ones again if there are too few."""
    ours = sorted(os.sched_getaffinity(0))
    return [ours[i % len(ours)] for i in range(count)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(library: ctypes.CDLL, x: Tensor, weight: Tensor) -> Tensor:
    return StripWeight(weight, library, Pages()).product(x)


def layer(library: ctypes.CDLL) -> DecoderLayer:
    def projection(outs: int, ins: int, seed: int) -> Projection:
        return Projection(random(outs, ins, seed=seed) / ins**0.5, random(outs, seed=seed + 1))

    kv = KV_HEADS * HEAD_DIM
    weights = LayerWeights(
        head_dim=HEAD_DIM,
        input_norm=Norm(random(HIDDEN, seed=1), 1e-5),
        q=projection(HEADS * HEAD_DIM, HIDDEN, 2),
        k=projection(kv, HIDDEN, 4),
        v=projection(kv, HIDDEN, 6),
        q_norm=Norm(random(HEAD_DIM, seed=8), 1e-5),
        k_norm=Norm(random(HEAD_DIM, seed=9), 1e-5),
        o=projection(HIDDEN, HEADS * HEAD_DIM, 10),
        post_norm=Norm(random(HIDDEN, seed=12), 1e-5),
        mlp=GatedMLP(projection(INNER, HIDDEN, 13), projection(INNER, HIDDEN, 15), projection(HIDDEN, INNER, 17)),
    )
    return DecoderLayer(weights, library)


def run_layer(layer: DecoderLayer, rows: int) -> Tensor:  # all that it computes, flattened
    hidden, attended = random(rows, HIDDEN, seed=20), random(rows, HEADS, HEAD_DIM, seed=21)
    angles = random(rows, HEAD_DIM // 2, seed=22).repeat(1, 2)
    q, k, v = layer.attention_inputs(hidden, angles.cos(), angles.sin())
    total, normed = layer.attention_outputs(attended, hidden)
    layer.add_mlp(normed, total)
    return torch.cat([part.flatten() for part in (q, k, v, total, normed)])


@pytest.mark.parametrize(("rows", "outs", "k"), [(1, 700, 2100), (3, 331, 579), (16, 1000, 576), (401, 203, 100)])
def test_a_product_has_the_same_bits_with_any_number_of_helpers(
    library: ctypes.CDLL, rows: int, outs: int, k: int
) -> None:
    x, weight = random(rows, k), random(outs, k, seed=1)
    alone = product(library, x, weight)
    torch.testing.assert_close(alone, x @ weight.T, rtol=0, atol=2e-5 * k**0.5)
    for helpers in range(1, 5):
        assert set_helpers(library, cores(helpers)) == helpers
        for _ in range(5):
            assert torch.equal(product(library, x, weight), alone), helpers


@pytest.mark.parametrize("query_lens", [[1], [1] * 3, [1] * 9, [40, 1, 3]])
def test_attention_has_the_same_bits_with_helpers(library: ctypes.CDLL, query_lens: list[int]) -> None:
    k_cache, v_cache = random(20, 16, 3, 24), random(20, 16, 3, 17, seed=1)
    q = random(sum(query_lens), 6, 24, seed=2)
    contexts = [200 + 61 * i for i in range(len(query_lens))]
    tables = torch.randint(20, (len(query_lens), 43), generator=torch.Generator().manual_seed(3))

    def attend() -> Tensor:
        layer = paged_layer(library, 6, k_cache, v_cache, scale=0.3, window=None, softcap=None, sinks=None)
        return attend_in_c(layer, native_step(query_lens, contexts, tables), q, 17)

    alone = attend()
    assert alone.isfinite().all()
    for helpers in (1, 4):
        assert set_helpers(library, cores(helpers)) == helpers
        for _ in range(5):
            assert torch.equal(attend(), alone), helpers


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_a_layer_has_the_same_bits_with_helpers(library: ctypes.CDLL, rows: int) -> None:
    ours = layer(library)
    alone = run_layer(ours, rows)
    for helpers in (1, 3):
        set_helpers(library, cores(helpers))
        for _ in range(3):
            assert torch.equal(run_layer(ours, rows), alone)


def test_helpers_do_work_and_it_is_counted(library: ctypes.CDLL) -> None:
    x, weight = random(64, 576), random(4096, 576, seed=1)
    before = sum(helped_seconds(library))
    product(library, x, weight)
    assert sum(helped_seconds(library)) == before
    set_helpers(library, cores(2)[1:])
    for _ in range(2000):  # on a core that is taken it may have to wait for its turn
        product(library, x, weight)
        if sum(helped_seconds(library)) > before:
            return
    pytest.fail("nobody helped")


def test_their_number_may_change_while_kernels_run(library: ctypes.CDLL) -> None:
    x, weight = random(8, 576), random(1536, 576, seed=1)
    alone = product(library, x, weight)
    over = threading.Event()
    changes = 0

    def change() -> None:
        nonlocal changes
        while not over.is_set():
            set_helpers(library, cores(changes % 5))
            changes += 1

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            assert torch.equal(product(library, x, weight), alone)
    finally:
        over.set()
        changing.join(timeout=30)
    assert changes > 5


def test_several_threads_may_call_kernels_at_once(library: ctypes.CDLL) -> None:
    set_helpers(library, cores(2))
    inputs = [(random(4, 300, seed=i), random(900, 300, seed=i + 9)) for i in range(3)]
    expected = [product(library, *pair) for pair in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(i for _ in range(100) if not torch.equal(product(library, *inputs[i]), expected[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not wrong


def test_a_forked_child_computes_alone_and_can_have_helpers_of_its_own(library: ctypes.CDLL) -> None:
    x, weight = random(8, 576), random(1536, 576, seed=1)
    set_helpers(library, cores(3))
    expected = product(library, x, weight)
    child = os.fork()
    if child == 0:
        good = torch.equal(product(library, x, weight), expected) and set_helpers(library, cores(2)) == 2
        os._exit(0 if good and torch.equal(product(library, x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(product(library, x, weight), expected)


def test_what_the_system_does_not_allow_is_not_counted_on(library: ctypes.CDLL) -> None:
    assert set_helpers(library, [*cores(1), 1023, 1 << 20, -1, *cores(1)]) == 2  # and costs nobody else a helper
    assert set_helpers(library, cores(MOST_HELPERS + 5)) == MOST_HELPERS
    x, weight = random(8, 576), random(1536, 576, seed=1)
    assert torch.equal(product(library, x, weight), product(library, x, weight))


def test_helpers_take_no_signals(library: ctypes.CDLL) -> None:
    set_helpers(library, cores(2))
    blocked = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        blocked.append(int(fields["SigBlk"], 16))
    everything = 0xFFFFFFFE7FFBFEFF  # but KILL, STOP, and the two that pthreads uses itself
    assert sum(mask & everything == everything for mask in blocked) >= 2
