"""Two hundred random schemas with the demo model: whatever finishes validates, most finish, and few are refused."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.system.harness import System
from tests.system.test_structured import outcome

pytestmark = pytest.mark.timeout(2400, method="signal")

NUM_SCHEMAS = 200
AT_ONCE = 32
NEVER = ("--local-prefill", "never")  # every first token comes from prefill, which knows the grammar too
# Aggregated: with prefill workers, reservations that wait for KV make room before anybody is preempted.
SMALL_POOL = ("--block-size", 8, "--kv-blocks", 28, "--no-prefix-caching")


def outcomes(system: System, num_schemas: int) -> Counter[str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = Counter(pool.map(lambda seed: outcome(system, seed), range(num_schemas)))
    system.assert_idle(1.0)
    return found


@pytest.mark.parametrize(("prefill", "flags"), [(1, NEVER), (0, SMALL_POOL)], ids=["1P1D", "aggregated, small pool"])
def test_answers_that_finish_validate(prefill: int, flags: tuple[object, ...]) -> None:
    with System("demo", *flags, "--queue-timeout-s", 900, prefill=prefill, decode=1) as system:
        found = outcomes(system, NUM_SCHEMAS)
        preempted = system.metric("pdserve_preemptions_total") > 0
    assert preempted == (flags == SMALL_POOL)
    assert found["stop"] >= 0.6 * NUM_SCHEMAS, found
    assert found["refused"] <= 0.1 * NUM_SCHEMAS, found
