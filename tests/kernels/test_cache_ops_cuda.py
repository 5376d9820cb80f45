"""The CUDA kernels change the same bytes as the reference does, and no others: on a device if there is one, and
always as plain C++ on the processor (see cuda_host.py), so that a wrong index is found without a device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import cache_ops, cache_ops_cuda, cuda_module
from tests.kernels.cuda_host import HostKernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
GUARD = 4096  # elements around whatever a kernel writes to
EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        if not torch.cuda.is_available() or find_spec("cupy") is None:
            pytest.skip("there is no CUDA device, or no CuPy")
        return "cuda"
    monkeypatch.setattr(cuda_module, "launch", request.getfixturevalue("host").launch)
    return "cpu"


@dataclass
class Case:
    """Two equal caches, one for the kernel and one for the reference, with room around them that nobody may touch."""

    block_size: int
    shapes: list[tuple[int, ...]]  # of K and V: [num_blocks, block_size, kv_heads, head_dim]
    dtype: torch.dtype
    slots: Tensor  # [num_tokens], fragmented
    offset: int  # elements by which the addresses are off the allocator's alignment
    device: str

    def __post_init__(self) -> None:
        self._whole = [self.random((self.offset + 2 * GUARD + torch.Size(shape).numel(),)) for shape in self.shapes]
        self._copies = [whole.to(self.device, copy=True) for whole in self._whole]
        self.reference = [self._inner(*pair) for pair in zip(self._whole, self.shapes, strict=True)]
        self.caches = [self._inner(*pair) for pair in zip(self._copies, self.shapes, strict=True)]

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-100, 100, shape).div(1 if self.dtype == torch.int8 else 7).to(self.dtype)

    def _inner(self, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
        begin = GUARD + self.offset
        return whole[begin : begin + torch.Size(shape).numel()].view(shape)

    def on_device(self, x: Tensor) -> Tensor:
        """With the strides that it has here."""
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        return copy.copy_(x)

    def rows(self, heads: int, head_dim: int, contiguous: bool) -> Tensor:
        """Values of a step's tokens; when not contiguous, part of wider rows, as the joined projections make them."""
        wide = self.random((len(self.slots), heads + (0 if contiguous else 3), head_dim))
        return wide[:, :heads]

    def check(self) -> None:
        for found, expected in zip(self._copies, self._whole, strict=True):
            assert same_bytes(found, expected)


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@st.composite
def cases(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> Callable[[str], Case]:
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    num_blocks = draw(st.integers(2, 9))
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    k_dim, v_dim = (draw(st.sampled_from([1, 5, 16, 24, 64, 130])) for _ in range(2))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    num_tokens = draw(st.integers(1, num_blocks * block_size))
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    shapes = [(num_blocks, block_size, heads, head_dim) for head_dim in (k_dim, v_dim)]
    dtype, offset = draw(st.sampled_from(dtypes)), draw(st.sampled_from([0, 0, 1, 2, 4]))
    return lambda device: Case(block_size, shapes, dtype, slots, offset, device)


@EXAMPLES
@given(make=cases(), contiguous=st.booleans())
def test_a_step_is_written_where_the_reference_writes_it(device: str, make, contiguous: bool) -> None:
    case = make(device)
    k, v = (case.rows(*shape[2:], contiguous) for shape in case.shapes)
    cache_ops.write_kv(*case.reference, k, v, case.slots)
    cache_ops_cuda.write_kv(*case.caches, case.on_device(k), case.on_device(v), case.slots.to(device))
    case.check()


@EXAMPLES
@given(make=cases(), shift=st.sampled_from([0, 0, 8, 3]))
def test_a_slab_has_the_bytes_of_the_reference_and_brings_them_back(device: str, make, shift: int) -> None:
    case = make(device)
    num_bytes = len(case.slots) * sum(cache[0, 0].nbytes for cache in case.reference)
    expected = torch.empty(num_bytes, dtype=torch.uint8)
    cache_ops.gather(*case.reference, case.slots, expected)
    room = torch.full((GUARD + shift + num_bytes + GUARD,), 77, dtype=torch.uint8, device=device)
    slab, slots = room[GUARD + shift : GUARD + shift + num_bytes], case.slots.to(device)
    cache_ops_cuda.gather(*case.caches, slots, slab.data_ptr())
    assert same_bytes(slab, expected)
    assert bool((room[: GUARD + shift] == 77).all())
    assert bool((room[-GUARD:] == 77).all())
    case.check()  # it only reads
    turned = case.slots.flip(0)  # other places
    cache_ops.scatter(*case.reference, turned, memoryview(expected.numpy()))
    cache_ops_cuda.scatter(*case.caches, turned.to(device), slab.data_ptr())
    case.check()


@EXAMPLES
@given(make=cases(), blocks=st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)))
def test_a_block_is_copied_in_every_cache_and_nothing_else(device: str, make, blocks: tuple[int, int]) -> None:
    case = make(device)
    source, target = (block % case.shapes[0][0] for block in blocks)
    cache_ops.copy_block(case.reference, source, target)
    cache_ops_cuda.copy_block(case.caches, source, target)
    case.check()


@EXAMPLES
@given(
    make=cases(DTYPES[:3]), heads=st.sampled_from([1, 4, 9]), part=st.sampled_from([1.0, 0.5]), apart=st.booleans(),
    contiguous=st.booleans(),
)  # fmt: skip
def test_rotary_positions_are_applied_to_the_bit(
    device: str, make, heads: int, part: float, apart: bool, contiguous: bool
) -> None:
    case = make(device)
    k_dim = case.shapes[0][3]
    q = case.rows(heads, k_dim, contiguous)
    k, v = (case.rows(*shape[2:], contiguous) for shape in case.shapes)
    rotary = int(k_dim * part) // 2 * 2
    angles = torch.rand(len(case.slots), rotary) * 6
    if not apart and rotary:
        angles = torch.cat([angles[:, : rotary // 2]] * 2, dim=1)
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    turned = case.on_device(q)
    moved = [case.on_device(x) for x in (k, v, cos, sin)]
    cache_ops_cuda.rotate_and_write(turned, *moved, *case.caches, case.slots.to(device))
    cache_ops.rotate_and_write(q, k, v, cos, sin, *case.reference, case.slots)
    assert same_bytes(turned, q)
    case.check()


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
def test_rows_of_any_number_of_bytes_are_moved_in_the_widest_words(
    device: str, word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    launch = cuda_module.launch
    monkeypatch.setattr(
        cuda_module, "launch", lambda file, name, *rest: (launched.append(name), launch(file, name, *rest))
    )
    case = Case(1, [(5, 1, 1, 3 * word), (5, 1, 1, 5 * word)], torch.int8, torch.tensor([4, 0, 2]), 0, device)
    slab, slots = torch.empty(3 * 8 * word, dtype=torch.uint8, device=device), case.slots.to(device)
    cache_ops_cuda.gather(*case.caches, slots, slab.data_ptr())
    cache_ops_cuda.scatter(*case.caches, slots.flip(0), slab.data_ptr())
    cache_ops_cuda.copy_block(case.caches, 2, 3)
    expected = torch.empty(3 * 8 * word, dtype=torch.uint8)
    cache_ops.gather(*case.reference, case.slots, expected)
    cache_ops.scatter(*case.reference, case.slots.flip(0), memoryview(expected.numpy()))
    cache_ops.copy_block(case.reference, 2, 3)
    case.check()
    assert launched == [f"{name}_{word}" for name in ("gather", "scatter", "copy_block")]
