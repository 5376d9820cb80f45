"""What the gateway's limits leave behind at real workers, and what its log says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.client import Refused
from tests.system.harness import System, eventually

pytestmark = pytest.mark.timeout(170, method="signal")

PROMPT = list(range(10, 60))
TIMEOUT_S = 4.0  # enough for a few tokens anywhere
MAX_TOKENS = 30_000  # which nobody computes in that time


def lines_of(system: System) -> list[dict[str, str]]:
    """The request log, each line as its fields."""
    lines = [line for line in system.stderr.splitlines() if "pdserve.requests: request " in line]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


def cut_off_stream(system: System, **fields: object) -> list[int]:
    """The tokens of a stream that ends with the error of the time limit. Meanwhile its client gets nothing else."""
    tokens: list[int] = []
    with system.client.events("/v1/completions", prompt=PROMPT, **fields) as events:
        tokens += next(events)["choices"][0]["token_ids"]
        with pytest.raises(Refused, match=r"429.*1 requests at once"):
            system.client.complete(PROMPT, max_tokens=1)
        with pytest.raises(AssertionError, match=r"error in the stream.*'code': 'timeout'"):
            tokens.extend(token for event in events for token in event["choices"][0]["token_ids"])
    return tokens


def test_a_request_at_its_time_limit_lets_go_of_both_pools_and_its_clients_next_one_is_served(tiny: Path) -> None:
    flags = ("--request-timeout-s", TIMEOUT_S, "--max-concurrent", 1, "--tokens-per-minute", 48_000)
    with System(tiny, "--local-prefill", "never", "--kv-blocks", 2048, "--prefill-kv-blocks", 256, *flags) as system:
        ask = {"temperature": 0, "ignore_eos": True}
        short = system.client.complete(PROMPT, max_tokens=8, **ask)
        pieces = cut_off_stream(system, max_tokens=MAX_TOKENS, **ask)
        assert 1 < len(pieces) < MAX_TOKENS
        assert pieces[:8] == short.token_ids
        system.assert_idle()
        # Most tokens of the minute were reserved for it. Those that it did not get are there again.
        last = system.client.complete(PROMPT, max_tokens=MAX_TOKENS, stop_token_ids=short.token_ids[:1], **ask)
        assert last.finish_reason == "stop"
        eventually(lambda: len(lines_of(system)) == 4, 5, "four lines")
        whole, refused, cut, again = lines_of(system)
        assert (whole["status"], whole["completion_tokens"], whole["outcome"]) == ("200", "8", "ok")
        assert (refused["status"], refused["client"]) == ("429", "ip:127.0.0.1")
        assert (cut["status"], cut["outcome"]) == ("200", "timeout")
        assert int(cut["completion_tokens"]) >= len(pieces)
        assert float(cut["e2e_s"]) >= TIMEOUT_S
        assert again["finish_reasons"] == "stop"
        assert int(again["cached_tokens"]) > 0
