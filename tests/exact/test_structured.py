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
SMALL_POOL_BLOCKS = 120  # of 8 tokens; the 32 want about 300


def test_answers_that_finish_validate_while_sequences_are_preempted() -> None:
    pools = ("--decode-block-size", 8, "--kv-blocks", SMALL_POOL_BLOCKS, "--prefill-kv-blocks", 1024)
    with System("demo", *pools, "--queue-timeout-s", 900, prefill=1, decode=1) as system:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = Counter(pool.map(lambda seed: outcome(system, seed), range(NUM_SCHEMAS)))
        system.assert_idle(1.0)
        assert system.metric("pdserve_preemptions_total") > 0
    print(dict(outcomes))
    assert outcomes["stop"] >= 0.6 * NUM_SCHEMAS, outcomes
    assert outcomes["refused"] <= 0.1 * NUM_SCHEMAS, outcomes
