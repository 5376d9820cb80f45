"""What operators may ask of a gateway, and who counts as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from pdserve.gateway.admin import Admin, LiveRequests
from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api_keys import CLIENT_STATE
from pdserve.gateway.app import on_api_error
from pdserve.gateway.models import Models
from pdserve.transfer.messages import Drain
from tests.gateway.harness import System, running_system, until


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running_system(tmp_path) as system:
        yield system


def operator(
    system: System, *, address: str = "127.0.0.1", key: str | None = None, live: LiveRequests | None = None,
    debug: bool = True,
) -> httpx.AsyncClient:  # fmt: skip
    """A client of the admin routes: from an address, having passed the door with a key of that name."""
    routes = Admin(system.pool, live or LiveRequests(), Models([])).routes(debug=debug)
    inner = Starlette(routes=routes, exception_handlers={ApiError: on_api_error})

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if key is not None:
            scope.setdefault("state", {})[CLIENT_STATE] = key
        await inner(scope, receive, send)

    transport = httpx.ASGITransport(app, client=(address, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


@pytest.mark.parametrize("full_id", [False, True])
async def test_worker_is_told_to_drain_by_name_or_by_full_id(system: System, full_id: bool) -> None:
    decode = system.decode("d0")
    await system.ready(1)
    async with operator(system) as client:
        name = decode.worker.replace("#", "%23") if full_id else "d0"
        answer = await client.post(f"/admin/drain/{name}", json={})
        assert answer.status_code == 202
        assert answer.json() == {"worker": decode.worker, "state": "draining", "inflight": 0}
        await until(lambda: decode.of(Drain))
        assert (await client.post(f"/admin/drain/{name}", json={})).status_code == 202
    await asyncio.sleep(0.1)
    assert len(decode.of(Drain)) == 1


async def test_unknown_worker_is_a_404_that_names_the_known_ones(system: System) -> None:
    system.decode("d0")
    await system.ready(1)
    async with operator(system) as client:
        answer = await client.post("/admin/drain/d7", json={})
    assert answer.status_code == 404
    assert "d7" in answer.json()["error"]["message"]
    assert "d0" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("address", "key", "status"),
    [
        ("127.0.0.1", None, 202),
        ("::1", None, 202),
        ("127.0.0.1", "somebody", 202),
        ("10.0.0.7", "admin", 202),
        ("10.0.0.7", None, 403),
        ("10.0.0.7", "somebody", 403),
        ("not an address", None, 403),
    ],
)
async def test_only_this_machine_and_the_key_named_admin_may_drain(
    system: System, address: str, key: str | None, status: int
) -> None:
    decode = system.decode("d0")
    await system.ready(1)
    async with operator(system, address=address, key=key) as client:
        assert (await client.post("/admin/drain/d0", json={})).status_code == status
    assert system.pool.workers[decode.worker].draining == (status == 202)


async def test_a_form_that_a_web_page_can_send_unasked_drains_nobody(system: System) -> None:
    decode = system.decode("d0")
    await system.ready(1)
    async with operator(system) as client:
        for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
            assert (await client.post("/admin/drain/d0", content=b"", headers=headers)).status_code == 415
        assert (await client.get("/admin/drain/d0")).status_code == 405
    assert not system.pool.workers[decode.worker].draining


async def test_debug_requests_shows_each_live_request_with_its_holders_and_never_its_words(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.answering = False
    request, _ = system.request(prompt_tokens=40, max_tokens=10)
    live = LiveRequests()
    live.add([request], "the-clients-id")
    task = asyncio.create_task(request.run())
    await until(lambda: request.state.value == "prefilling")
    async with operator(system, live=live) as client:
        (shown,) = (await client.get("/debug/requests")).json()["requests"]
        assert (shown["http_id"], shown["id"], shown["state"]) == ("the-clients-id", request.id, "prefilling")
        assert shown["model"] == "m"
        assert shown["prefill"] == {"where": "prefill", "reason": "faster_there"}
        assert (shown["attempt"], shown["prompt_tokens"], shown["output_tokens"]) == (1, 40, [0])
        assert 0 <= shown["age_s"] < 60
        holders = {leg["worker"]: leg for leg in shown["holders"]}
        assert holders.keys() == {decode.worker, prefill.worker}
        assert (holders[decode.worker]["tokens"], holders[decode.worker]["blocks"]) == (40, 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        live.remove([request])
        assert (await client.get("/debug/requests")).json()["requests"] == []


async def test_debug_requests_is_not_there_unless_switched_on_nor_for_others(system: System) -> None:
    async with operator(system, debug=False) as client:
        assert (await client.get("/debug/requests")).status_code == 404
    async with operator(system, address="10.0.0.7", key="somebody") as client:
        assert (await client.get("/debug/requests")).status_code == 403
