"""API keys: who gets in, what the others are told, and under which name a request runs."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pdserve.gateway.api_keys import (
    PROBE_VARIABLE,
    ApiKeys,
    client_of,
    keys_in_force,
    line_for,
    new_key,
    read_api_keys,
)
from pdserve.gateway.keygen import main as keygen
from pdserve.transfer.errors import ConfigError

ALICE, BOB = new_key(), new_key()


async def say_who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(client_of(request.scope))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may\n\n{line_for('alice', ALICE)}\n  {line_for('bob', BOB)}\n")
    return path


@pytest.fixture
async def client(key_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route("/{path:path}", say_who, methods=["GET", "POST"])])
    transport = httpx.ASGITransport(ApiKeys(app, read_api_keys(key_file)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


async def test_each_key_gets_in_under_its_own_name(client: httpx.AsyncClient) -> None:
    for key, name in ((ALICE, "alice"), (BOB, "bob")):
        for scheme in ("Bearer", "bearer"):
            answer = await client.post("/v1/completions", headers={"Authorization": f"{scheme} {key}"})
            assert (answer.status_code, answer.text) == (200, f"key:{name}")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer no", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}"],
    ids=["none", "empty", "scheme", "scheme and space", "other", "basic", "no scheme", "longer", "shorter"],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models", "/metrics", "/pools", "/version", "/health/x", "//health"]
)
async def test_without_a_right_key_everything_is_refused_in_openais_shape(
    client: httpx.AsyncClient, path: str, header: str | None
) -> None:
    answer = await client.get(path, headers={} if header is None else {"Authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"


async def test_two_keys_at_once_are_none(client: httpx.AsyncClient) -> None:
    headers = [("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {BOB}")]
    assert (await client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


async def test_keys_are_compared_in_constant_time(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in (ALICE, BOB, "x"):
        await client.get("/", headers={"Authorization": f"Bearer {key}"})
    assert compared == [32] * 6  # every known hash each time, whichever matches


def test_without_keys_a_request_runs_under_its_address() -> None:
    assert client_of({"type": "http", "client": ("10.1.2.3", 5), "state": {}}) == "ip:10.1.2.3"
    assert client_of({"type": "http", "client": None}) == "ip:"


def test_no_client_can_take_a_name_by_its_address_or_the_other_way_round() -> None:
    by_address = client_of({"type": "http", "client": ("alice", 1)})
    assert by_address != client_of({"type": "http", "state": {"client": "alice"}})


def test_the_file_keeps_no_key(key_file: Path) -> None:
    assert ALICE not in key_file.read_text()
    assert len(ALICE) > 40


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice", "line 1"),
        ("alice:1234", "line 1"),
        (f"\nalice:{'G' * 64}", "line 2"),
        (f"a b:{'0' * 64}", "line 1"),
        (f":{'0' * 64}", "line 1"),
        (f"a:{'0' * 64}\na:{'1' * 64}", "line 2"),
        (f"a:{'0' * 64}\nb:{'0' * 64}", "line 2"),
        ("# nobody\n", "no API key"),
        (f"\na:{'0' * 64} rpm=5", "line 2.*rpm=5"),
        (f"a:{'0' * 64} max-concurrent=0", "line 1.*max-concurrent=0"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_api_keys(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_api_keys(tmp_path / "nothing")


def test_limits_may_stand_behind_a_key(key_file: Path) -> None:
    key_file.write_text(f"{line_for('alice', ALICE)}\n{line_for('bob', BOB)}  max-concurrent=3 tokens-per-minute=none")
    limits = {key.name: key.limits for key in read_api_keys(key_file).values()}
    assert limits == {"alice": {}, "bob": {"max_concurrent": 3, "tokens_per_minute": None}}


def test_the_probe_of_up_gets_in_and_only_where_keys_are_asked_for(key_file: Path) -> None:
    assert keys_in_force(None, {PROBE_VARIABLE: "p"}) is None
    with_probe = keys_in_force(key_file, {PROBE_VARIABLE: "p"})
    assert with_probe is not None
    assert sorted(key.name for key in with_probe.values()) == ["alice", "bob", "up"]
    assert keys_in_force(key_file, {}) == read_api_keys(key_file)


def test_a_key_is_shown_once_with_the_line_that_lets_it_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keygen("api", "carol") == 0
    shown = capsys.readouterr()
    key, line = shown.out.strip(), shown.err.splitlines()[-1]
    assert line == line_for("carol", key)
    assert key not in shown.err
    (tmp_path / "keys").write_text(line)
    assert read_api_keys(tmp_path / "keys")


@pytest.mark.parametrize("arguments", [("api", None), ("api", "a:b"), ("d", "x")])
def test_arguments_that_make_no_sense_are_refused(
    arguments: tuple[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert keygen(*arguments) == 2
    assert capsys.readouterr().err.startswith("pdserve keys: error: ")
