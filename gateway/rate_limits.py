"""How much one client may ask for: requests a minute, tokens a minute, and requests at once.

    account = limiter.account("key:alice", limits)
    ticket = account.enter()            # before the body is read: counts the request, and one more at work
    ticket.expect_tokens()              # refused when there are none left anyway
    ticket.require(least)               # before tokenising: refused when it can only be too much
    ticket.reserve(most, used)          # prompt + the most that may come out; used() says later what it was
    ticket.leave()                      # always: the difference is given back

What is per minute is a bucket: it holds a minute's worth, and fills up at that rate. A refusal is an ApiError 429 with
code `rate_limit_exceeded` that names the limit and says when to come back. Refused before its body was read, a
request costs nothing; refused for its size it counts as a request.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from .api.errors import ApiError

MAX_ACCOUNTS = 65536  # clients remembered; of those beyond that the one longest away is forgotten
SMALLEST_REQUEST_TOKENS = 2  # one in, one out
UNSTATED_OUTPUT_TOKENS = 512  # reserved for an answer to which the client set no limit
CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True)
class ClientLimits:
    """Limits of one client; None is without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    @property
    def in_force(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS = ClientLimits()


def parse_limits(words: Sequence[str]) -> dict[str, int | None]:
    """`requests-per-minute=60 max-concurrent=none` as fields of ClientLimits. Raises ValueError naming the word."""
    known = {field.name.replace("_", "-"): field.name for field in fields(ClientLimits)}
    found: dict[str, int | None] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or known[name] in found:
            raise ValueError(f"{word!r:.80} is not one of {', '.join(known)} (each once, as in {next(iter(known))}=60)")
        if value != "none" and not (value.isascii() and value.isdecimal() and 0 < int(value) < 1 << 53):
            raise ValueError(f"{word!r:.80} needs a positive whole number, or none")
        found[known[name]] = None if value == "none" else int(value)
    return found


class Bucket:
    """`per_minute` at most at once, and the same again every minute. Below zero when more was used than was there."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._filled_at) * self.per_minute / 60, self.per_minute)
        self._filled_at = now
        return self._level

    def take(self, amount: float) -> None:
        """Negative amounts are given back."""
        self._level = min(self.level - amount, self.per_minute)

    def wait_s(self, amount: float) -> float:
        """How long until `amount` is there; it must not be more than the bucket can hold."""
        return max(amount - self.level, 0.0) * 60 / self.per_minute

    @property
    def remaining(self) -> int:
        return max(math.floor(self.level), 0)

    @property
    def reset_s(self) -> float:
        """How long until it is full."""
        return self.wait_s(self.per_minute)


class Account:
    """What one client has used of its limits."""

    def __init__(
        self, name: str, limits: ClientLimits, clock: Callable[[], float], on_refusal: Callable[[str], None]
    ) -> None:
        self._name = name
        self._on_refusal = on_refusal
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        self.tokens = Bucket(limits.tokens_per_minute, clock) if limits.tokens_per_minute else None
        self.concurrent = 0

    def enter(self) -> Ticket:
        """Let one more request in. Raises ApiError 429."""
        most = self.limits.max_concurrent
        if most is not None and self.concurrent >= most:
            raise self.refusal("concurrency", f"{most} requests at once", CONCURRENCY_RETRY_S)
        if self.requests is not None:
            if wait_s := self.requests.wait_s(1):
                raise self.refusal("requests", f"requests per minute: limit {self.requests.per_minute}", wait_s)
            self.requests.take(1)
        self.concurrent += 1
        return Ticket(self)

    def refusal(self, limit: str, what: str, wait_s: float | None) -> ApiError:
        """`wait_s` None: it will never fit, and clients that try again by themselves are told not to."""
        self._on_refusal(limit)
        headers = {"x-should-retry": "false"}
        when = ""
        if wait_s is not None:
            headers = {"Retry-After": str(max(math.ceil(wait_s), 1)), "retry-after-ms": str(math.ceil(wait_s * 1000))}
            when = f" Please try again in {duration(wait_s)}."
        message = f"Rate limit reached for {self._name} on {what}.{when}"
        type_ = "tokens" if limit == "tokens" else "requests"
        return ApiError(429, message, type=type_, code="rate_limit_exceeded", headers=headers)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers for the limits per minute."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining)
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.reset_s)
        return found


class Ticket:
    """One request that was let in, and the tokens reserved for it. Without an account nothing is counted."""

    def __init__(self, account: Account | None) -> None:
        self._account = account
        self._reserved = 0
        self._used: Callable[[], int] = int

    def expect_tokens(self) -> None:
        """Raise ApiError 429 when not even the smallest request would get its tokens; it costs nothing then."""
        if self._account is None or self._account.tokens is None:
            return
        tokens = self._account.tokens
        if wait_s := tokens.wait_s(min(SMALLEST_REQUEST_TOKENS, tokens.per_minute)):
            if self._account.requests is not None:
                self._account.requests.take(-1)
            what = f"tokens per minute: limit {tokens.per_minute}, remaining {tokens.remaining}"
            raise self._account.refusal("tokens", what, wait_s)

    @property
    def counts_tokens(self) -> bool:
        return self._account is not None and self._account.tokens is not None

    def require(self, num_tokens: int) -> None:
        """Raise ApiError 429 when there are not that many left."""
        if self._account is None or self._account.tokens is None:
            return
        tokens = self._account.tokens
        what = f"tokens per minute: limit {tokens.per_minute}, remaining {tokens.remaining}, requested {num_tokens}"
        if num_tokens > tokens.per_minute:
            raise self._account.refusal("tokens", what, None)
        if wait_s := tokens.wait_s(num_tokens):
            raise self._account.refusal("tokens", what, wait_s)

    def reserve(self, num_tokens: int, used: Callable[[], int]) -> None:
        """The same, and they are its own then. `used` is asked at the end how many it took."""
        self.require(num_tokens)
        if self._account is not None and self._account.tokens is not None:
            self._account.tokens.take(num_tokens)
            self._reserved, self._used = num_tokens, used

    def leave(self) -> None:
        """The request is over: give back what was reserved and not used, or take what was used beyond it."""
        account, self._account = self._account, None
        if account is None:
            return
        account.concurrent -= 1
        if account.tokens is not None:
            account.tokens.take(self._used() - self._reserved)


class RateLimiter:
    """The accounts of all clients. `on_refusal` is told which limit ("requests", "tokens" or "concurrency")."""

    def __init__(
        self,
        on_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        max_accounts: int = MAX_ACCOUNTS,
    ) -> None:
        self._on_refusal = on_refusal
        self._clock = clock
        self._max_accounts = max_accounts
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def account(self, client: str, limits: ClientLimits) -> Account:
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= self._max_accounts:
                self._forget_one()
            account = self._accounts[client] = Account(client, limits, self._clock, self._on_refusal)
        self._accounts.move_to_end(client)
        return account

    def _forget_one(self) -> None:
        idle = next((name for name, account in self._accounts.items() if not account.concurrent), None)
        if idle is not None:
            del self._accounts[idle]


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 6.5s, 1m30s. Rounded up, so that who waits that long has waited long enough."""
    ms = math.ceil(round(seconds * 1000, 3))
    if 0 < ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest_s = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{rest_s}s"
