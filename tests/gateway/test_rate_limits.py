"""Limits of one client: what is counted, what is refused, and what is given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.rate_limits import Account, ClientLimits, RateLimiter, Ticket, duration, parse_limits


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def account_of(clock: Clock, limits: ClientLimits) -> tuple[Account, list[str]]:
    refused: list[str] = []
    return RateLimiter(refused.append, clock).account("key:alice", limits), refused


def refusal(attempt: object, *arguments: object) -> ApiError:
    assert callable(attempt)
    with pytest.raises(ApiError) as caught:
        attempt(*arguments)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_a_minutes_worth_of_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    clock = Clock()
    account, refused = account_of(clock, ClientLimits(requests_per_minute=30))
    for _ in range(30):
        account.enter()
    error = refusal(account.enter)
    assert "requests per minute: limit 30" in error.message
    assert "key:alice" in error.message
    assert (error.headers["Retry-After"], error.headers["retry-after-ms"]) == ("2", "2000")
    clock.now_s = 1.9
    refusal(account.enter)
    clock.now_s = 2.0
    account.enter()
    refusal(account.enter)
    assert refused == ["requests"] * 3


def test_no_more_than_allowed_are_at_work_at_once_and_who_leaves_makes_room() -> None:
    account, refused = account_of(Clock(), ClientLimits(max_concurrent=2))
    first, second = account.enter(), account.enter()
    assert "2 requests at once" in refusal(account.enter).message
    first.leave()
    first.leave()  # a second time changes nothing
    account.enter()
    refusal(account.enter)
    second.leave()
    assert refused == ["concurrency"] * 2
    assert account.headers() == {}


def test_what_was_reserved_and_not_used_is_given_back() -> None:
    account, _ = account_of(Clock(), ClientLimits(tokens_per_minute=100))
    ticket = account.enter()
    ticket.reserve(80, lambda: 30)
    assert account.headers()["x-ratelimit-remaining-tokens"] == "20"
    other = account.enter()
    error = refusal(other.reserve, 21, int)
    assert "limit 100, remaining 20, requested 21" in error.message
    assert error.type == "tokens"
    other.leave()
    ticket.leave()
    assert account.headers() == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "18s",
    }


def test_what_was_used_beyond_the_reservation_is_owed() -> None:
    clock = Clock()
    account, _ = account_of(clock, ClientLimits(tokens_per_minute=60))
    ticket = account.enter()
    ticket.reserve(60, lambda: 90)
    ticket.leave()
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(account.enter().expect_tokens).headers["Retry-After"] == "32"
    clock.now_s = 32
    account.enter().expect_tokens()


def test_what_can_never_fit_is_not_to_be_tried_again() -> None:
    account, _ = account_of(Clock(), ClientLimits(tokens_per_minute=60))
    error = refusal(account.enter().reserve, 61, int)
    assert error.headers == {"x-should-retry": "false"}


def test_a_request_refused_before_it_was_read_costs_nothing_and_one_refused_for_its_size_counts() -> None:
    account, _ = account_of(Clock(), ClientLimits(requests_per_minute=10, tokens_per_minute=60))
    ticket = account.enter()
    ticket.reserve(60, lambda: 60)
    ticket.leave()
    ticket = account.enter()
    refusal(ticket.expect_tokens)
    ticket.leave()
    assert account.headers()["x-ratelimit-remaining-requests"] == "9"
    ticket = account.enter()
    refusal(ticket.reserve, 2, int)
    ticket.leave()
    assert account.headers()["x-ratelimit-remaining-requests"] == "8"


def test_without_limits_nothing_is_counted() -> None:
    ticket = Ticket(None)
    ticket.expect_tokens()
    ticket.reserve(1 << 40, int)
    ticket.leave()
    assert not ClientLimits().in_force


@given(
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 120), st.integers(0, 120)), max_size=40),
    per_minute=st.integers(1, 100),
)
def test_over_any_stretch_no_more_is_used_than_a_minutes_worth_and_the_rate(
    steps: list[tuple[float, int, int]], per_minute: int
) -> None:
    clock = Clock()
    account, _ = account_of(clock, ClientLimits(tokens_per_minute=per_minute))
    used = 0
    for pause_s, asked, wanted in steps:
        clock.now_s += pause_s
        ticket = account.enter()
        took = min(asked, wanted)
        try:
            ticket.reserve(asked, lambda took=took: took)
        except ApiError:
            took = 0
        ticket.leave()
        used += took
        assert used <= per_minute * (1 + clock.now_s / 60) + 1e-6
        assert 0 <= int(account.headers()["x-ratelimit-remaining-tokens"]) <= per_minute


def test_of_too_many_clients_the_idle_one_longest_away_is_forgotten() -> None:
    limiter = RateLimiter(lambda _: None, Clock(), max_accounts=2)
    limits = ClientLimits(requests_per_minute=5)
    busy, idle = limiter.account("busy", limits), limiter.account("idle", limits)
    busy.enter()
    idle.enter().leave()
    limiter.account("third", limits)
    assert limiter.account("busy", limits) is busy
    assert limiter.account("idle", limits) is not idle


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (0.9999, "1s"), (6.5, "6.5s"), (59.9995, "1m0s"), (90.2, "1m31s")],
)
def test_durations_are_written_as_openai_does_and_never_too_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_limits_of_a_key_are_words_with_numbers_or_none() -> None:
    assert parse_limits([]) == {}
    words = ["requests-per-minute=60", "tokens-per-minute=none", "max-concurrent=1"]
    assert parse_limits(words) == {"requests_per_minute": 60, "tokens_per_minute": None, "max_concurrent": 1}


@pytest.mark.parametrize(
    "words",
    [["rpm=1"], ["max-concurrent"], ["max-concurrent=0"], ["max-concurrent=-1"], ["max-concurrent=x"],
     ["max-concurrent=1.5"], ["max-concurrent=1", "max-concurrent=2"], ["max_concurrent=1"]],
)  # fmt: skip
def test_words_that_make_no_sense_are_named(words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0].partition("=")[0]):
        parse_limits(words)
