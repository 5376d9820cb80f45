"""The scenarios of `bench peers`, against scripted servers and hand-made records."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pdserve.bench.client import Client, Dialect, open_session
from pdserve.bench.prompts import PromptMaker, id_pieces
from pdserve.bench.record import INTERRUPTED, RequestRecord
from pdserve.bench.scenarios import (
    FIGURES,
    Course,
    Figure,
    ScenarioFailed,
    disturbed_figures,
    gaps_ms,
    open_gaps_ms,
    ratio,
)

MAKER = PromptMaker(id_pieces(1000, 7999), seed=1)


def record(times_s: list[float], error: str = "") -> RequestRecord:
    return RequestRecord(0, 64, 128, None, 0.0, 0.0, times_s, error=error)


def test_a_gap_belongs_to_the_time_in_which_it_ends() -> None:
    stream = record([1.0, 1.5, 2.5, 2.6])
    assert gaps_ms([stream], 1.0, 2.0) == pytest.approx([500])
    assert gaps_ms([stream], 2.0, 3.0) == pytest.approx([100, 1000])


def test_a_stream_that_stands_still_at_the_end_shows() -> None:
    still, ended, waiting = record([1.0, 2.0], INTERRUPTED), record([1.0, 2.0]), record([], INTERRUPTED)
    assert open_gaps_ms([still, ended, waiting], 9.0) == pytest.approx([7000])
    figures = disturbed_figures([still, record([1.0, 2.0, 4.5])], [], 0.0, 3.0, 9.0)
    assert figures["itl_max_ms"] == pytest.approx(7000)
    assert figures["calm_itl_p99_ms"] == pytest.approx(1000)
    assert figures["calm_tok_s"] == pytest.approx(4 / 3)
    assert figures["kept"] == pytest.approx((1 / 6) / (4 / 3))


def test_long_prompts_without_an_answer_are_counted() -> None:
    background = [record([1.0, 2.0, 4.0])]
    long = [RequestRecord(0, 400, 8, 3.0, 3.0, 5.0, [4.2]), RequestRecord(1, 400, 8, 5.0, 5.0, error=INTERRUPTED)]
    figures = disturbed_figures(background, long, 0.0, 3.0, 6.0)
    assert figures["long_answered"] == 0.5
    assert figures["long_ttft_ms"] == pytest.approx(1200)


@pytest.mark.parametrize("background", [[record([1.0, 2.0, 4.0]), record([], "http_503")], [record([])]])
def test_a_failed_stream_fails_the_scenario(background: list[RequestRecord]) -> None:
    with pytest.raises(ScenarioFailed):
        disturbed_figures(background, [], 0.0, 3.0, 6.0)


def test_a_ratio_is_to_the_best_of_the_others() -> None:
    latency, rate = Figure("a ttft_ms", "", "lower"), Figure("b tok_s", "", "higher")
    others = [{"a ttft_ms": 100.0, "b tok_s": 50.0}, {"a ttft_ms": 200.0, "b tok_s": 80.0}, {}]
    mine = {"a ttft_ms": 50.0, "b tok_s": 120.0}
    assert ratio(latency, mine, others) == 0.5
    assert ratio(rate, mine, others) == 1.5
    assert ratio(rate, mine, []) is None
    assert ratio(rate, {}, others) is None


async def run_course(url: str, scenarios: list[str], dialect: Dialect) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with open_session(20.0) as session:
        course = Course(Client(session, url, "tiny", dialect), MAKER, reps=2, calm_s=0.3, disturbed_s=4.1)
        await course.warm_up()
        for scenario in scenarios:
            figures |= await course.run(scenario)
    return figures


async def test_every_scenario_yields_its_figures_and_sends_what_it_says(server: Any, script: Any) -> None:
    server.behaviours = [script.complete(gap_s=0.01)]
    figures = await run_course(server.url, ["a", "b", "c", "d-over"], Dialect())
    expected = {figure.key for figure in FIGURES if figure.scenario != "d-mild"}
    assert figures.keys() == expected
    assert all(value > 0 for value in figures.values())
    shapes = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert (shapes.count((128, 64)), shapes.count((1024, 1)), shapes.count((1500, 8))) == (2 * 17, 2, 2)
    assert figures["d-over long_answered"] == 1
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies)


async def test_a_server_of_text_gets_text_and_no_field_that_it_does_not_know(server: Any, script: Any) -> None:
    server.behaviours = [script.complete()]
    dialect = Dialect(ignore_eos=False, as_text=lambda ids: " ".join(map(str, ids)))
    await run_course(server.url, ["c"], dialect)
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert not any({"ignore_eos", "return_token_ids"} & body.keys() for body in server.bodies)


async def test_a_refusal_fails_the_scenario_with_its_words(server: Any) -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no room"}}, status=503)

    server.behaviours = [refuse]
    with pytest.raises(ScenarioFailed, match="http_503: no room"):
        await asyncio.wait_for(run_course(server.url, ["a"], Dialect()), 20)
