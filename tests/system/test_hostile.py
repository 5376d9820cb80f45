"""A running system under attack on every port: nobody dies, real requests get the right text, frames are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq

from pdserve.kernels.slabs import checksum
from pdserve.transfer.codec import encode
from pdserve.transfer.messages import (
    Cancel,
    Credit,
    Failed,
    FirstTokens,
    GatewayHeartbeat,
    Gone,
    Handoff,
    Hello,
    Leaving,
    Peer,
    Peers,
    Prefill,
    Registered,
    Reserved,
    Slab,
    Tokens,
    WorkerHeartbeat,
)
from pdserve.transfer.offers import RingSpan
from pdserve.transfer.reports import Family, Link, Sample
from pdserve.transfer.sampling_params import SamplingParams
from tests.system.client import Refused
from tests.system.harness import Gateway, Launch, eventually, free_port
from tests.system.hostile import (
    HUGE,
    MAX_TOKENS,
    MIB,
    NOISE,
    PROMPTS,
    OtherGateway,
    Target,
    endpoint,
    frames,
    reserve,
    shake_hands,
    stranger,
)  # fmt: skip

pytestmark = pytest.mark.timeout(170, method="signal")

FLOOD_S = 30.0


@pytest.fixture(scope="module")
def target(tiny: Path) -> Iterator[Target]:
    """A gateway, a prefill and a decode worker on tcp ports of this machine, without keys."""
    runtime = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
    control = f"tcp://127.0.0.1:{free_port()}"
    other = OtherGateway(f"ipc://{runtime}/other")
    flags = ("--model", tiny, "--gateway", control, "--gateway", f"ipc://{runtime}/other", "--check-invariants")
    flags += ("--kv-blocks", 64)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, runtime)
        stack.callback(other.close)
        gateway = Gateway(
            "gateway", "--model", tiny, "--listen", control, "--local-prefill", "never",
            model="tiny", port=free_port(), runtime=runtime,
        )  # fmt: skip
        stack.enter_context(gateway)
        workers = [
            Launch("decode", *flags, "--name", "d", "--listen", "tcp://127.0.0.1:0", runtime=runtime),
            Launch("prefill", *flags, "--name", "p", "--chunk-tokens", 32, runtime=runtime),
        ]
        for worker in workers:
            stack.enter_context(worker)
        gateway.wait_ready(1, 1)
        eventually(lambda: len(other.registers) == 2, 10, "the workers register with the other gateway, too")
        target = Target(gateway, workers, other)
        target.golden = [target.answer(number) for number in range(len(PROMPTS))]
        assert all(len(tokens) == MAX_TOKENS for tokens in target.golden)
        yield target


# --- strangers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["gateway", "bulk", "control"])
def test_what_strangers_send_to_a_port_is_counted_and_changes_nothing(target: Target, port: str) -> None:
    address = target.ports[port]
    layout = target.other.worker("decode").layout
    with target.serving() as enough, zmq.Context() as context, ExitStack() as stack:
        for noise in NOISE:
            raw = stack.enter_context(socket.create_connection(endpoint(address), timeout=5))
            raw.sendall(noise)
        taken = target.gateway.workers()[0]["id"] + "/1"  # the name of somebody who is here
        for identity in (b"nobody#00000000/1", taken.encode(), b"x"):
            dealer = stack.enter_context(stranger(context, address, identity))
            for parts in frames(layout):
                with contextlib.suppress(zmq.Again):  # it was cut, as it should be
                    dealer.send_multipart(parts)
        eventually(enough, 30, "requests are answered")


@pytest.mark.parametrize("port", ["gateway", "bulk", "control"])
def test_a_flood_from_strangers_starves_nobody_and_is_cut_off(target: Target, port: str) -> None:
    address = target.ports[port]
    flood = encode(Hello("nobody#00000000", target.other.worker("decode").layout, "zmq"))
    beat = encode(WorkerHeartbeat(1, [("r", 1)] * 500, True, 1, 1, 1, 1, 1, False, [], []))
    reason = {"reason": "flood"}
    before = target.gateway.metric("pdserve_frames_dropped_total", **reason)
    with target.serving() as enough, zmq.Context() as context, ExitStack() as stack:
        dealers = [stack.enter_context(stranger(context, address, b"n#0000000%d/1" % i)) for i in range(4)]

        def flood_on() -> None:
            for dealer in dealers:
                with contextlib.suppress(zmq.Again):
                    for _ in range(50):
                        dealer.send(flood, zmq.DONTWAIT)
                        dealer.send(beat, zmq.DONTWAIT)

        def cut_off() -> bool:
            return target.gateway.metric("pdserve_frames_dropped_total", **reason) > before

        while not enough():
            flood_on()
        deadline = time.monotonic() + FLOOD_S
        while not cut_off():  # a busy worker takes in few of them at a time
            assert time.monotonic() < deadline, "nobody is cut off"
            for _ in range(20):
                flood_on()


@pytest.mark.parametrize("port", ["gateway", "bulk", "control"])
def test_parts_without_end_do_not_fill_the_memory(target: Target, port: str) -> None:
    address = target.ports[port]
    pids = target.processes()
    rss = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    most = 0
    before = target.gateway.metric("pdserve_frames_dropped_total", reason="backlog")
    with target.serving() as enough, socket.create_connection(endpoint(address), timeout=10) as raw:
        shake_hands(raw, b"endless#00000000/1")
        raw.settimeout(0.1)
        feed = rest = b"\x01\x00" * 50_000
        while not enough():
            with contextlib.suppress(OSError):
                rest = rest[raw.send(rest) :] or feed
            most = max(most, *(psutil.Process(pid).memory_info().rss - rss[pid] for pid in pids))
    assert most < 300 * MIB
    counted = lambda: target.gateway.metric("pdserve_frames_dropped_total", reason="backlog") > before  # noqa: E731
    eventually(counted, 15, "the endless message is counted")


# --- those who were let in ---------------------------------------------------------------------------------------

MANY = ([5] * 128, 0.0)  # tokens and seconds of a handoff


def test_absurd_orders_of_a_gateway_that_was_let_in_harm_nobody_else(target: Target) -> None:
    other, decode = target.other, target.other.worker("decode")
    longest = SamplingParams(4_000_000, (1 << 64) - 1, temperature=1e4, top_k=1 << 31, stop_token_ids=[1 << 31] * 9)
    nan = dataclasses.replace(longest, repetition_penalty=1e-300, temperature=1e-300)
    other.live = [(name, 1) for name in "abcdefghijklmn"]  # else they would be dropped without an answer
    with target.serving() as enough:
        other.tell(
            "decode",
            reserve("a", prompt=[1 << 31] * 100),
            reserve("b", prompt=[5] * 500_000),
            reserve("c", params=longest),
            reserve("d", outputs=[[]] * 128, finished=[False] * 128),
            reserve("e", outputs=[[]] * 3, finished=[False]),
            reserve("f", finished=[True]),
            reserve("g", outputs=[[1] * 100_000]),
            reserve("h", params=nan, prefill="", local_prefill="always"),
            reserve("i", priority=-(1 << 31), age_s=1e7, prompt=PROMPTS[1] * 3),
            reserve("i", attempt=1 << 20),
            reserve("i"),
            Cancel("nothing", 1, 127),
            Gone("nothing", 1 << 20),
            Registered("other#00000000", "somebody#00000000"),
            GatewayHeartbeat(HUGE, [("nothing", 1)] * 1000),
            Credit(HUGE),
            Tokens([]),
        )
        other.tell(
            "prefill",
            *(
                Prefill(name, 1, prompt, [], 127, 128, nan, worker, HUGE, HUGE, 1e7, "", -(1 << 31))
                for name, prompt, worker in (
                    ("j", [1 << 31], decode.worker),
                    ("k", PROMPTS[0], decode.worker),
                    ("l", [5] * 500_000, decode.worker),
                    ("m", PROMPTS[0], "nobody#00000000"),
                )
            ),
            Prefill("n", 1, PROMPTS[0], [], 0, 1, longest, decode.worker, 7, 3, 0.0, "", 0),
            Peers([Peer("x#00000000", "h", "junk", "tcp://", [])]),
            Peers([Peer("x#00000000", "h", "tcp://127.0.0.1:1", "ipc:///nowhere/at/all", ["zmq"])]),
            Peers([]),
        )
        eventually(lambda: other.requests(Failed) >= set("abcefgh"), 10, "what can never run is refused")
        eventually(enough, 30, "requests are answered")
        other.live = []


def test_slabs_replayed_reordered_or_wrong_are_counted_and_never_become_a_text(target: Target) -> None:
    other, decode = target.other, target.other.worker("decode")
    layout = decode.layout

    def slab(request: str, reservation: int, layer: int, first: int, count: int, spoil: int = 0) -> list[bytes]:
        payload = bytes(count * layout.layer_bytes_per_token(layer))
        total = checksum(memoryview(payload)) ^ spoil
        return [encode(Slab(request, 1, reservation, layer, first, count, total)), payload]

    good = [(layer, 0, len(PROMPTS[2])) for layer in range(layout.num_layers)]
    plans: dict[str, Callable[[str, int], list[list[bytes]]]] = {
        "replayed": lambda r, n: [slab(r, n, *good[0]), slab(r, n, *good[0])],
        "reordered": lambda r, n: [slab(r, n, 0, 16, 16), slab(r, n, 0, 0, 16)],
        "corrupt": lambda r, n: [slab(r, n, 0, 0, 16, spoil=1)],
        "short": lambda r, n: [[slab(r, n, 0, 0, 16)[0], b"x"]],
        "too far": lambda r, n: [slab(r, n, 0, 0, 4000)],
        "no such layer": lambda r, n: [[encode(Slab(r, 1, n, 1023, 0, 1, 0)), b"x" * 64]],
        "early handoff": lambda r, n: [
            slab(r, n, *good[0]),
            [encode(Slab(r, 1, n, 1, 0, 16, 0, RingSpan(0, 64)))],  # in a ring that is not there
            [encode(Handoff(r, 1, n, [5], 0.0))],
        ],
        "many tokens": lambda r, n: [*(slab(r, n, *g) for g in good), [encode(Handoff(r, 1, n, *MANY))]],
        "old reservation": lambda r, n: [slab(r, n + 1, *g) for g in good],
    }
    with target.serving() as enough, zmq.Context() as context, ExitStack() as stack:
        bulk = stack.enter_context(stranger(context, decode.bulk_address, b"evil#00000000/1"))
        control = stack.enter_context(stranger(context, decode.peer_address, b"evil#00000000/1"))
        for side in (bulk, control):
            side.send(encode(Hello("evil#00000000", layout, "zmq")))
        assert control.poll(5000), "decode lets the evil worker in"
        other.live = [(name, 1) for name in plans]
        other.tell("decode", *(reserve(name, prompt=PROMPTS[2], cache_salt=name) for name in plans))
        eventually(lambda: other.requests(Reserved) >= set(plans), 15, "all are reserved")
        numbers = {m.request: m.reservation for m in other.received if isinstance(m, Reserved)}
        for name, plan in plans.items():
            for parts in plan(name, numbers[name]):
                bulk.send_multipart(parts)
        lost = set(plans) - {"old reservation"}
        eventually(lambda: other.requests(Failed) >= lost, 10, "each attempt fails at once")
        eventually(enough, 30, "requests are answered")
        other.live = []
        other.tell("decode", *(Cancel(name, 1) for name in plans))
    texts = {item[0] for m in other.received if isinstance(m, Tokens) for item in m.items}
    assert texts & set(plans) == set()


def test_absurd_reports_of_a_worker_that_was_let_in_harm_nobody_else(target: Target) -> None:
    """It registers as a prefill worker, which it never is ready to be."""
    me = dataclasses.replace(target.other.worker("prefill"), worker="odd#00000000", num_blocks=1 << 40, pid=HUGE)
    family = Family("pdserve_odd", "counter", "x", [Sample("pdserve_odd_total", {"a": 'b"\n'}, float("nan"))])
    bad_name = Family("a b{}\n", "gauge", "x\ny", [Sample("c d", {"e f": "g"}, float("inf"))])
    link = Link("d#00000000", "zmq", "linked", "", HUGE)
    live, families = [("r", 1)] * 50_000, [family, bad_name]
    beat = WorkerHeartbeat(HUGE, live, False, HUGE, HUGE, HUGE, HUGE, HUGE, False, [link], families)
    address = target.ports["gateway"]
    with target.serving() as enough, zmq.Context() as context, stranger(context, address, b"odd#00000000/1") as mine:
        mine.send(encode(me))
        assert mine.poll(5000), "the gateway lets it in"
        for message in (
            beat,
            Tokens([(f"r{i}", 1 << 20, 127, HUGE, 1 << 31, "length") for i in range(5000)]),
            Reserved("r", 1, HUGE, HUGE, True, "x", 1e7),
            FirstTokens("r", 1, 127, HUGE, [1 << 31] * 128, HUGE, 1e7, 1e7),
            Credit(1),
            dataclasses.replace(me, worker="somebody#00000000"),
        ):
            mine.send(encode(message))
        with stranger(context, address, b"odd#00000000/2") as thief:
            thief.send(encode(me))  # the same worker on another connection, while the first one stands
            assert not thief.poll(700), "nobody takes the place of a worker that is here"

        def lasts() -> bool:
            mine.send(encode(dataclasses.replace(beat, live=[])))  # whoever is silent is given up
            return enough()

        eventually(lasts, 30, "requests are answered")
        assert {worker["name"] for worker in target.gateway.workers()} == {"d", "p", "odd"}
        assert "pdserve_odd_total" in target.gateway.client.get("/metrics").text
        mine.send(encode(Leaving("odd#00000000")))


# --- HTTP ----------------------------------------------------------------------------------------------------------


def test_noise_on_the_http_port_is_refused_and_changes_nothing(target: Target) -> None:
    address = ("127.0.0.1", target.gateway.port)
    before = target.processes()
    with ExitStack() as stack:
        for noise in (*NOISE, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n"):
            raw = stack.enter_context(socket.create_connection(address, timeout=5))
            raw.sendall(noise)
        assert target.answer(0) == target.golden[0]
    assert target.processes() == before


@pytest.mark.parametrize("field", ["attempt", "reservation", "kv_transfer_params"])
def test_internal_fields_in_a_clients_body_are_refused(target: Target, field: str) -> None:
    with pytest.raises(Refused) as refused:
        target.gateway.client.complete(PROMPTS[0], max_tokens=1, **{field: 1})
    assert refused.value.status == 400
    assert field in refused.value.message
