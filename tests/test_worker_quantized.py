"""Quantised workers: the split gives the text of the same model unsplit, and never mixes with another quantisation."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import describe
from pdserve.engine.setup import Engine
from pdserve.kernels.quantized import QUANTIZATIONS, Quantization
from pdserve.transfer.messages import Peer, Peers
from tests.engine.tiny_models import build, prompts
from tests.test_worker_logprobs import dispatch as send
from tests.test_worker_logprobs import entries, params
from tests.test_worker_pair import dispatch, settle
from tests.worker_rig import Rig, reserve_message

PROMPTS = prompts([50, 3, 33])
NAMES = ["r0", "r1", "r2"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Quantization | None], Rig]]:
    """A rig whose next workers run the model quantised so."""
    rig = Rig(tmp_path)

    def with_kind(kind: Quantization | None) -> Rig:
        def engine(num_blocks: int, block_size: int) -> Engine:
            model = describe(build("llama"), fingerprint="tiny", max_model_len=256, quantization=kind)
            return Engine(model, KVCache(model.layout, num_blocks, block_size), BlockPool(num_blocks, block_size))

        rig.engine = engine
        return rig

    yield with_kind
    rig.close()


def texts(rig: Rig) -> list[list[int]]:
    rig.until(lambda: all(rig.finished(name) for name in NAMES), "all have finished")
    found = [rig.tokens(name)[0] for name in NAMES]
    for name in NAMES:
        rig.live.discard((name, 1))
    return found


def alone(rig: Rig) -> list[list[int]]:
    """By a decode worker without prefill, one request after the other."""
    decode = rig.start_decode()
    found = []
    for i, prompt in enumerate(PROMPTS):
        rig.live.add((f"alone{i}", 1))
        rig.send(decode, reserve_message(f"alone{i}", prompt))
        rig.until(lambda name=f"alone{i}": bool(rig.finished(name)), "it has finished")
        found.append(rig.tokens(f"alone{i}")[0])
    settle(rig, decode)
    return found


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_text_through_both_workers_is_that_of_the_quantised_model_unsplit(
    start: Callable[[Quantization | None], Rig], kind: Quantization
) -> None:
    rig = start(kind)
    expected = alone(rig)
    prefill, decode = rig.pair()
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        dispatch(rig, name, prompt, prefill, decode)
    assert texts(rig) == expected
    settle(rig, prefill, decode)


@pytest.mark.parametrize(("first", "second"), [("int8", None), ("int8", "int4")])
def test_a_pair_with_different_quantisation_is_refused_by_name(
    start: Callable[[Quantization | None], Rig], first: Quantization, second: Quantization | None
) -> None:
    decode = start(first).start_decode()
    rig = start(second)
    prefill = rig.start_prefill()
    register = rig.registered[decode]
    assert register.layout.quantization == first
    rig.send(prefill, Peers([Peer(decode, "here", register.bulk_address, register.peer_address, register.links)]))
    rig.until(lambda: any(link.state == "refused" for link in rig.links(prefill)), "the link is refused")
    assert f"quantization {first} != {second or 'none'}" in rig.links(prefill)[0].detail


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_first_token_is_the_same_to_the_bit_when_all_but_one_token_is_cached(
    start: Callable[[Quantization | None], Rig], kind: Quantization
) -> None:
    rig = start(kind)
    same = prompts([41] * 5)  # 40 are whole blocks on either side, and chunks are of 16
    decode = rig.start_decode()
    prefill, other = rig.pair()
    for i, prompt in enumerate(same):
        for name in (f"cold{i}", f"warm{i}"):
            send(rig, name, prompt, decode, params=params())
            rig.until(lambda name=name: bool(rig.finished(name)), "it has finished")
        for name in (f"cold split{i}", f"warm split{i}"):
            send(rig, name, prompt, other, prefill, params=params())
            rig.until(lambda name=name: bool(rig.finished(name)), "it has finished")
        first = entries(rig, f"cold{i}")[0]
        assert [entries(rig, f"{name}{i}")[0] for name in ("warm", "cold split", "warm split")] == [first] * 3
