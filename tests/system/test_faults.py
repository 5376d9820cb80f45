"""A fixed set of faults, each while a request is in flight; the random ones are `make soak`.

Two prefill and two decode workers with a proxy on every link. After every test the system is whole again and holds
nothing.

Every test says who computes prompts: with "never" prefill workers do, so they hold requests and KV passes on the links;
with "auto" decode workers do as well, of those that come alone or find no prefill worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.system.faults.attack import Attack
from tests.system.faults.fleet import Fleet, Shape
from tests.system.faults.judge import Fault, Judge, differences
from tests.system.faults.load import Answer, Case, Leave, ask
from tests.system.faults.scenario import assert_nothing_remains, tiny, wait_whole
from tests.system.harness import eventually
from tests.system.tiny_model import random_prompt

pytestmark = pytest.mark.timeout(180, method="signal")

NUM_LAYERS = 8
DEATH_BOUND_S = 2.5
LONG_PROMPT_TOKENS = 3000


@dataclass(frozen=True)
class Field:
    fleet: Fleet
    attack: Attack
    judge: Judge
    greedy: list[Case]
    others: list[Case]


def local_prefill(*modes: str) -> pytest.MarkDecorator:
    """On which systems a test runs. There is one at a time, so tests stand in the order of their systems."""
    return pytest.mark.parametrize("running", modes, indirect=True)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Prompts are computed in one chunk; with a ring so small a slab goes for every layer of a long one, or two."""
    model = tiny(tmp_path_factory.mktemp("faults"), NUM_LAYERS)
    shape = Shape(
        model.path,
        model.name,
        death_bound_s=DEATH_BOUND_S,
        gateway_flags=("--local-prefill", request.param),
        prefill_flags=("--kv-blocks", 400, "--chunk-tokens", 4096, "--ring-memory", "4M"),
        decode_flags=("--kv-blocks", 256, "--transfer-deadline-s", 2),
    )
    with Fleet(shape) as fleet:
        greedy, others = model.cases(fleet.port, random.Random(5), num_greedy=4, outputs=(30, 80))
        judge = Judge()
        yield Field(fleet, Attack(fleet, judge, random.Random(6), lambda: 1), judge, greedy, others)


@pytest.fixture
def field(running: Field) -> Iterator[Field]:
    yield running
    wait_whole(running.fleet)
    assert_nothing_remains(running.fleet)
    assert not running.fleet.ended, f"ended by themselves: {running.fleet.ended}\n{running.fleet.log_tail()}"


def assert_golden(answer: Answer) -> None:
    assert answer.complete, f"{answer.case.name}: {answer.status} {answer.error} {answer.broken} hung: {answer.hung}"
    assert not differences(answer), differences(answer)


def answers_during(field: Field, cases: list[Case], strike: Callable[[], Fault]) -> tuple[list[Answer], Fault]:
    """Ask all of it, again and again until `strike` has found one of the requests; the last round's answers."""
    with ThreadPoolExecutor(len(cases) + 1) as pool:
        blow = pool.submit(strike)
        answers: list[Answer] = []
        first = True
        while first or not blow.done():
            first = False
            salt = f"{random.getrandbits(40):x}"  # nothing is found in a prefix cache
            answers += pool.map(lambda case: ask(field.fleet.port, case, stream=True, salt=salt), cases)  # noqa: B023
        return answers, blow.result()


@local_prefill("auto")
def test_stream_goes_on_with_golden_text_when_its_decode_worker_is_killed(field: Field) -> None:
    retries = field.fleet.metric("pdserve_retries_total")
    answers, fault = answers_during(field, field.greedy, lambda: field.attack.kill("decode"))
    assert fault.inflight > 0
    for answer in answers:
        assert_golden(answer)
    # One or other may end without: by words sent before the blow.
    assert field.fleet.metric("pdserve_retries_total") > retries


@local_prefill("auto")
def test_requests_go_on_without_any_prefill_worker(field: Field) -> None:
    for name in ("prefill-0", "prefill-1"):
        field.fleet.kill(name)
    for case in field.greedy:
        assert_golden(ask(field.fleet.port, case, stream=True))
    eventually(lambda: field.fleet.pids("prefill") == {}, 10, "the gateway knows that nobody but decode is left")
    for name in ("prefill-0", "prefill-1"):
        field.fleet.spawn(name)


@local_prefill("auto")
def test_worker_frozen_for_less_than_the_death_bound_keeps_its_requests(field: Field) -> None:
    old = {worker["name"]: worker["id"] for worker in field.fleet.workers()}
    seconds = DEATH_BOUND_S / 5  # and some time to find and to look at it
    answers, _ = answers_during(field, field.greedy, lambda: field.attack.freeze("decode", seconds, "freeze"))
    for answer in answers:
        assert_golden(answer)
    assert {worker["name"]: worker["id"] for worker in field.fleet.workers()} == old


@local_prefill("auto", "never")
def test_many_long_prompts_that_are_all_cancelled_leave_the_system_as_it_was(field: Field) -> None:
    def come_and_go(number: int) -> Answer:
        prompt = random_prompt(1000 + number, LONG_PROMPT_TOKENS)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
        return ask(field.fleet.port, Case("long", body), stream=number % 2 == 0, leave_s=0.05 + 0.01 * (number % 40))

    for _ in range(2):
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(come_and_go, range(80)))
        assert sum(answer.left for answer in answers) > 60
        assert_nothing_remains(field.fleet)
    for case in field.greedy:
        assert_golden(ask(field.fleet.port, case, stream=True))


@local_prefill("never")
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_every_way_of_asking_survives_a_kill(field: Field, program: str) -> None:
    answers, fault = answers_during(field, field.others, lambda: field.attack.kill(program))
    assert fault.inflight > 0
    for answer in answers:
        assert_golden(answer)


@local_prefill("never")
def test_without_workers_the_answer_is_503_with_retry_after_and_recovery_needs_no_help(field: Field) -> None:
    workers = [*field.fleet.names("prefill"), *field.fleet.names("decode")]
    for name in workers:
        field.fleet.kill(name)
    eventually(lambda: not field.fleet.workers(), 5 * DEATH_BOUND_S, "the gateway knows that all are dead")
    answer = ask(field.fleet.port, field.greedy[0], stream=True)
    assert answer.status == 503
    assert answer.error is not None
    assert answer.error["code"] == "no_worker"
    assert answer.retry_after is not None
    for name in workers:
        field.fleet.spawn(name)
    wait_whole(field.fleet)
    assert_golden(ask(field.fleet.port, field.greedy[0], stream=True))


@local_prefill("never")
@pytest.mark.parametrize(
    ("harm", "kind", "reason"),
    [
        ("corrupt_payload", "Slab", "bad_checksum"),
        ("drop", "Slab", "incomplete"),
        ("duplicate", "Slab", "gap"),
        ("duplicate", "Handoff", "unknown_reservation"),
        ("corrupt_header", "Slab", ""),
    ],
)
def test_harmed_frame_is_counted_and_the_text_is_golden(field: Field, harm: str, kind: str, reason: str) -> None:
    before = field.fleet.metric("pdserve_frames_dropped_total", role="decode", **({"reason": reason} if reason else {}))
    answers, _ = answers_during(field, field.greedy[:2], lambda: harm_any(field, harm, kind))
    for answer in answers:
        assert_golden(answer)

    def counted() -> bool:
        labels = {"reason": reason} if reason else {}
        return field.fleet.metric("pdserve_frames_dropped_total", role="decode", **labels) > before

    eventually(counted, 10, "the frame is counted as dropped")


@local_prefill("never")
@pytest.mark.parametrize(
    ("harm", "kind"),
    [("drop", "Handoff"), ("reorder", "Slab"), ("reorder", "Handoff"), ("delay", "Slab"), ("corrupt_token", "Handoff")],
)
def test_text_is_golden_whatever_happens_to_a_frame(field: Field, harm: str, kind: str) -> None:
    answers, _ = answers_during(field, field.greedy[:2], lambda: harm_any(field, harm, kind))
    for answer in answers:
        assert_golden(answer)


def harm_any(field: Field, harm: str, kind: str) -> Fault:
    """Harm one such frame on the link to a decode worker that holds a request."""
    name = eventually(
        lambda: next((n for n in field.fleet.names("decode") if field.fleet.inflight().get(n)), None), 10, "a holder"
    )
    return field.attack.harm(name, harm, kinds=(kind,), delay_s=0.3)


@local_prefill("never")
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_requests_of_a_frozen_worker_move_on_and_nothing_of_its_old_life_counts(field: Field, program: str) -> None:
    old = {worker["name"]: worker["id"] for worker in field.fleet.workers()}
    seconds = DEATH_BOUND_S + 1.0
    answers, fault = answers_during(field, field.greedy, lambda: field.attack.freeze(program, seconds, "freeze"))
    for answer in answers:
        assert_golden(answer)

    def reborn() -> bool:
        now = {worker["name"]: worker["id"] for worker in field.fleet.workers()}
        return now.get(fault.process, old[fault.process]) != old[fault.process]

    eventually(reborn, 10, "it came back as somebody else")
    wait_whole(field.fleet)
    assert field.fleet.members[fault.process].lives >= 1
    assert field.fleet.log_lines(fault.process, "dropping all work"), "it noticed that it was away"


@local_prefill("never")
def test_prompt_that_is_cancelled_stops_at_the_next_layer(field: Field) -> None:
    """The worker stands still while the client leaves, so it meets the cancel at its next layer however fast it is."""
    body = {"model": "tiny", "prompt": random_prompt(1, LONG_PROMPT_TOKENS), "max_tokens": 4}
    leave = Leave()
    case = Case("long", body)
    before = field.fleet.metric("pdserve_computed_tokens_total", role="prefill")
    with field.attack.watching("decode-0", ("Slab",)) as one, field.attack.watching("decode-1", ("Slab",)) as other:
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(ask, field.fleet.port, case, stream=True, leave=leave)
            eventually(lambda: not (one.empty() and other.empty()), 10, "the first layer is on its way")
            with field.attack.standing_still("prefill") as name:
                sent = one.qsize() + other.qsize()
                leave.go()
                answer = leaving.result(timeout=30)
                eventually(lambda: not field.fleet.inflight().get(name), 5, "the gateway has cancelled it")
        assert answer.left
        assert_nothing_remains(field.fleet)
    assert field.fleet.metric("pdserve_computed_tokens_total", role="prefill") - before < LONG_PROMPT_TOKENS
    assert one.qsize() + other.qsize() <= sent + 2, "one layer was under way, and one may begin as the cancel arrives"
