"""The GPU's attention under Triton's interpreter, against the definition: every shape, and NaN wherever nothing is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention_plan import GpuPlan, default_num_splits, max_splits, plan_fixed, plan_step
from tests.kernels.interpreted import attention_triton, interpreting, triton_tuning
from tests.kernels.paged_cases import Case, Inputs, expected, make

KVScales = attention_triton.KVScales
NONSENSE = 2**31 - 1  # in entries of a block table that are not in use
TOLERANCES = {torch.float32: 3e-6, torch.float16: 4e-3}

__all__ = ["interpreting"]  # the fixture
pytestmark = [
    pytest.mark.usefixtures("interpreting"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # in rows that are padding
]


def set_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    for name in ("DECODE_TILES", "PREFILL_TILES", "PREFILL_TILES_FLOAT32"):
        monkeypatch.setattr(attention_triton, name, [triton_tuning.Tiles(rows, keys, 4, 1)])


def plan_of(case: Case, inputs: Inputs, num_splits: int = 3) -> GpuPlan:
    tables = inputs.batch.block_tables.clone()
    for table, length in zip(tables, case.context_lens, strict=True):
        table[-(-length // case.block_size) :] = NONSENSE
    return plan_step(case.query_lens, case.context_lens, tables, num_splits)


def compute(case: Case, inputs: Inputs, plan: GpuPlan, scales: object = None) -> Tensor:
    return attention_triton.attend_on_gpu(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        plan,
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=inputs.sinks,
        scales=scales,
    )


def check(case: Case, seed: int = 0, num_splits: int = 3) -> None:
    inputs = make(case, seed)
    result = compute(case, inputs, plan_of(case, inputs, num_splits))
    assert result.dtype == case.dtype
    torch.testing.assert_close(result.double(), expected(case, inputs), rtol=0, atol=TOLERANCES[case.dtype])


CASES = {
    "plain": Case(),
    "pages-of-one": Case(block_size=1),
    "pages-of-three": Case(block_size=3),
    "pages-of-128": Case(block_size=128, query_lens=(1, 40), context_lens=(200, 140)),
    "odd-heads": Case(heads=9, kv_heads=3, k_head_dim=5, v_head_dim=5, block_size=3),
    "one-kv-head": Case(heads=7, kv_heads=1, k_head_dim=80, v_head_dim=80),
    "latent": Case(heads=4, kv_heads=4, k_head_dim=24, v_head_dim=17, block_size=32),
    "wide-heads": Case(heads=2, kv_heads=1, k_head_dim=256, v_head_dim=256),
    "window": Case(window=5),
    "window-of-one": Case(window=1, block_size=3),
    "window-equal-to-context": Case(window=29),
    "window-beyond-context": Case(window=1000),
    "window-shorter-than-chunk": Case(window=4, query_lens=(20, 3), context_lens=(31, 3)),
    "window-of-several-tiles": Case(window=70, query_lens=(90, 1), context_lens=(250, 290)),
    "window-ends-with-a-tile": Case(window=64, query_lens=(1, 1, 1, 33), context_lens=(64, 65, 128, 129)),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "half": Case(dtype=torch.float16, window=9, softcap=3.0, sinks=True),
    "whole-prompts": Case(query_lens=(13, 100), context_lens=(13, 100)),
    "many-tiles-over-a-prefix": Case(query_lens=(65, 64), context_lens=(192, 100), heads=3, kv_heads=1),
    "decode-of-many-lengths": Case(query_lens=(1,) * 8, context_lens=(1, 3, 31, 32, 33, 127, 128, 129)),
    "decode-of-several-splits": Case(query_lens=(1, 1, 1), context_lens=(513, 1700, 1), sinks=True),
    "decode-of-several-splits-in-a-window": Case(
        query_lens=(1, 1), context_lens=(1300, 700), window=611, block_size=32
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_definition(name: str) -> None:
    check(CASES[name])


def random_case(rng: random.Random) -> Case:
    kv_heads, group = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 3, 4, 7])
    k_head_dim = rng.choice([64, 64, 128, rng.randint(1, 100)])
    query_lens, context_lens = [], []
    for _ in range(rng.randint(1, 4)):
        query_len = 1 if rng.random() < 0.5 else rng.randint(1, 60)
        cached = 0 if rng.random() < 0.3 else rng.randint(1, 900 if query_len == 1 else 200)
        query_lens.append(query_len)
        context_lens.append(query_len + cached)
    return Case(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        k_head_dim=k_head_dim,
        v_head_dim=k_head_dim if rng.random() < 0.7 else rng.randint(1, 80),
        block_size=rng.choice([1, 3, 16, 16, 32, 64, 128]),
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        window=rng.choice([None, None, rng.randint(1, 40), rng.randint(1, 700)]),
        softcap=rng.choice([None, None, 2.0]),
        sinks=rng.random() < 0.3,
        dtype=rng.choice([torch.float32, torch.float16]),
    )


def test_more_splits_than_are_combined_at_a_time_equal_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "COMBINED_SPLITS", 2)
    # Of four splits the last has most keys in the first sequence, the second in the other.
    check(Case(heads=2, kv_heads=1, query_lens=(1, 1), context_lens=(640, 700)), num_splits=8)


@pytest.mark.parametrize("seed", range(24))
def test_random_steps_equal_their_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    set_tiles(monkeypatch, rows=rng.choice([16, 32, 64]), keys=rng.choice([16, 32, 64, 128]))
    monkeypatch.setattr(attention_triton, "COMBINED_SPLITS", 2)
    check(random_case(rng), seed, num_splits=rng.randint(1, 4))


def quantise(cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A cache in `dtype` and its scales; where nothing is, bytes of any value and scales of NaN."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scales = cache.abs().amax(dim=3) / largest
    steps = (cache / scales[..., None]).nan_to_num(largest)
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), scales


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        Case(query_lens=(1, 37, 1), context_lens=(70, 61, 1), k_head_dim=40, v_head_dim=24),
        Case(query_lens=(1, 20), context_lens=(600, 33), window=300, softcap=2.0, sinks=True, block_size=64),
    ],
)
def test_a_quantised_cache_is_read_with_its_scales(case: Case, compute_dtype: torch.dtype, dtype: torch.dtype) -> None:
    inputs = make(case)
    # Some tokens are a thousand times larger than others, as they are in real caches.
    inputs.v_cache *= 10.0 ** torch.randint(-2, 2, (*inputs.v_cache.shape[:3], 1))
    k_cache, k_scales = quantise(inputs.k_cache, dtype)
    v_cache, v_scales = quantise(inputs.v_cache, dtype)
    stored = replace(inputs, q=inputs.q.to(compute_dtype), k_cache=k_cache, v_cache=v_cache)
    result = compute(case, stored, plan_of(case, inputs), KVScales(k_scales, v_scales))
    exact = replace(
        stored,
        k_cache=k_cache.double() * k_scales[..., None].double(),
        v_cache=v_cache.double() * v_scales[..., None].double(),
    )
    tolerance = {torch.float32: 3e-5, torch.float16: 4e-2}[compute_dtype]
    torch.testing.assert_close(result.double(), expected(case, exact), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", [Case(), Case(window=6), Case(query_lens=(1, 9, 1), context_lens=(1300, 200, 600))])
def test_a_sequence_gives_the_same_bits_alone_and_beside_others(case: Case) -> None:
    inputs = make(case)
    together = compute(case, inputs, plan_of(case, inputs)).split(list(case.query_lens))
    rows = inputs.q.split(list(case.query_lens))
    for i, part in enumerate(together):
        alone = replace(case, query_lens=(case.query_lens[i],), context_lens=(case.context_lens[i],))
        plan = plan_step(alone.query_lens, alone.context_lens, inputs.batch.block_tables[i : i + 1], 3)
        assert torch.equal(compute(alone, replace(inputs, q=rows[i]), plan), part)


@pytest.mark.parametrize("query_len", [1, 5])
def test_where_the_blocks_lie_does_not_change_a_bit(query_len: int) -> None:
    case = Case(query_lens=(query_len,), context_lens=(150,))
    inputs = make(case)
    order = torch.randperm(len(inputs.k_cache), generator=torch.Generator().manual_seed(9))
    moved = replace(inputs, k_cache=inputs.k_cache[order], v_cache=inputs.v_cache[order])
    tables = torch.argsort(order)[inputs.batch.block_tables]
    plan = plan_step(case.query_lens, case.context_lens, tables, 3)
    assert torch.equal(compute(case, moved, plan), compute(case, inputs, plan_of(case, inputs)))


def test_layers_of_different_shapes_and_windows_share_a_step() -> None:
    plan = plan_of(Case(), make(Case()))
    cases = [Case(window=5), Case(k_head_dim=8, v_head_dim=12), Case(), Case(window=2), Case(heads=6, sinks=True)]
    for case in (*cases, cases[0]):
        inputs = make(case)  # from the same seed: other values, the same block tables
        assert torch.equal(compute(case, inputs, plan), compute(case, inputs, plan_of(case, inputs)))


def test_a_step_of_fixed_shape_gives_the_bits_of_the_same_step_and_zeros_for_padding() -> None:
    case = Case(query_lens=(1,) * 4, context_lens=(700, 5, 1, 64), sinks=True)
    inputs = make(case)
    wide = torch.full((7, 99), NONSENSE, dtype=torch.int32)
    kept = [0, 2, 3, 5]
    wide[kept, : inputs.batch.block_tables.shape[1]] = plan_of(case, inputs).block_tables.int()
    lens = torch.zeros(7, dtype=torch.int32)
    lens[kept] = torch.tensor(case.context_lens, dtype=torch.int32)
    q = torch.full((7, *inputs.q.shape[1:]), float("nan"))
    q[kept] = inputs.q
    result = compute(case, replace(inputs, q=q), plan_fixed(lens, wide, case.block_size, 3))
    assert torch.equal(result[kept], compute(case, inputs, plan_of(case, inputs)))
    assert torch.equal(result[[1, 4, 6]], torch.zeros_like(result[[1, 4, 6]]))


def test_a_step_of_nothing_but_padding_gives_zeros() -> None:
    inputs = make(Case())
    tables = torch.full((3, 4), NONSENSE, dtype=torch.int32)
    plan = plan_fixed(torch.zeros(3, dtype=torch.int32), tables, 16, 3)
    result = compute(Case(), replace(inputs, q=inputs.q[:3]), plan)
    assert torch.equal(result, torch.zeros_like(result))


def test_queries_and_sinks_may_lie_in_any_order_in_memory() -> None:
    case = Case(sinks=True)
    inputs = make(case)
    plan = plan_of(case, inputs)
    dense = compute(case, inputs, plan)
    wide = torch.randn(9, 9, 16)
    wide[:, 2:6] = inputs.q
    assert inputs.sinks is not None
    sinks = torch.stack([inputs.sinks, inputs.sinks], dim=1)[:, 0]
    for q in (wide[:, 2:6], inputs.q.transpose(0, 1).contiguous().transpose(0, 1), inputs.q.mT.contiguous().mT):
        assert torch.equal(compute(case, replace(inputs, q=q, sinks=sinks), plan), dense)


def test_a_sequence_whose_kv_is_nan_spoils_no_other() -> None:
    case = Case(query_lens=(1, 1, 9), context_lens=(33, 29, 70))
    inputs = make(case)
    whole = compute(case, inputs, plan_of(case, inputs))
    inputs.k_cache[inputs.batch.block_tables[1, 0]] = float("nan")
    spoilt = compute(case, inputs, plan_of(case, inputs))
    assert spoilt[1].isnan().any()
    assert torch.equal(spoilt[[0, *range(2, 11)]], whole[[0, *range(2, 11)]])


def test_a_single_long_sequence_is_shared_out_among_all_programs() -> None:
    num_splits = default_num_splits(torch.device("cpu"), kv_heads=1)
    assert num_splits == 3
    case = Case(heads=2, kv_heads=1, query_lens=(1,), context_lens=(5000,))
    inputs = make(case)
    plan = plan_of(case, inputs, num_splits)
    compute(case, inputs, plan)
    assert plan.singles is not None
    (splits,) = plan.singles.splits.values()
    assert splits.first_splits.tolist() == [0, 3]


def test_without_a_gpu_tiles_are_not_measured() -> None:
    def prepare() -> None:
        pytest.fail("measured")

    first, second = triton_tuning.Tiles(0, 32, 4, 1), triton_tuning.Tiles(0, 64, 4, 1)
    assert triton_tuning.choose("key", [first, second], torch.device("cpu"), prepare) is first  # type: ignore[arg-type]


def test_no_step_has_more_splits_than_there_is_room_for() -> None:
    for window in (None, 1, 700):
        lengths = [*range(1, 3000, 61), 512, 513, 1024, 1025]
        plan = plan_step([1] * len(lengths), lengths, torch.zeros(len(lengths), 1, dtype=torch.int64), 5)
        assert plan.singles is not None
        listed = attention_triton._splits(plan.singles, window or attention_triton.NO_WINDOW).first_splits
        room = torch.tensor([max_splits(length, 5) for length in lengths])
        assert (listed.diff() <= room).all()
        assert listed.diff().min() == 1
        assert (listed.diff().max() == 5) == (window is None)
