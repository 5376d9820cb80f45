"""Workers with KV in int8: the split gives the text of one worker alone, also after preemption, and moves less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.setup import Engine
from pdserve.transfer.layout import KVLayout
from pdserve.transfer.messages import Peer, Peers
from tests.engine.tiny_models import build
from tests.test_worker_pair import dispatch, settle
from tests.test_worker_quantized import NAMES, PROMPTS, alone, texts
from tests.worker_rig import Rig


def tiny(kv_dtype: str) -> LoadedModel:
    model = describe(build("llama"), fingerprint="tiny", max_model_len=256)
    return replace(model, layout=replace(model.layout, dtype=kv_dtype))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    """A rig whose next workers keep their KV so."""
    rig = Rig(tmp_path)

    def with_dtype(kv_dtype: str) -> Rig:
        def engine(num_blocks: int, block_size: int) -> Engine:
            model = tiny(kv_dtype)
            return Engine(model, KVCache(model.layout, num_blocks, block_size), BlockPool(num_blocks, block_size))

        rig.engine = engine
        return rig

    yield with_dtype
    rig.close()


def bytes_of(layout: KVLayout) -> int:
    """Of one token: a byte for every number, and four for each of the two scales of a head."""
    return sum(shape.kv_heads * (shape.k_head_dim + shape.v_head_dim + 8) for shape in layout.layers)


@pytest.mark.parametrize("link", ["shm", "zmq"])
def test_text_through_both_workers_is_that_of_one_and_the_bytes_are_those_of_the_layout(
    start: Callable[[str], Rig], link: str
) -> None:
    rig = start("int8")
    expected = alone(rig)
    prefill, decode = rig.pair(prefill_link=link, link=link)
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        dispatch(rig, name, prompt, prefill, decode)
    assert texts(rig) == expected
    sent = sum(map(len, PROMPTS)) * bytes_of(rig.registered[decode].layout)
    assert rig.metric(decode, "pdserve_transfer_bytes_total", link=link) == sent
    settle(rig, prefill, decode)


@pytest.mark.parametrize(("first", "second"), [("int8", "float32"), ("float32", "int8")])
def test_a_pair_with_other_kv_is_refused_by_name(start: Callable[[str], Rig], first: str, second: str) -> None:
    decode = start(first).start_decode()
    rig = start(second)
    prefill = rig.start_prefill()
    register = rig.registered[decode]
    rig.send(prefill, Peers([Peer(decode, "here", register.bulk_address, register.peer_address, register.links)]))
    rig.until(lambda: any(link.state == "refused" for link in rig.links(prefill)), "the link is refused")
    assert f"dtype {first} != {second}" in rig.links(prefill)[0].detail
