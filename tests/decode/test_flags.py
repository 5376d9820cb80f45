"""Flags of a decode worker that cannot mean anything."""

from __future__ import annotations

import pytest

from pdserve.decode.config import parse_arguments
from pdserve.transfer.errors import ConfigError

NEEDED = ["--model", "demo", "--gateway", "ipc:///gateway", "--name", "d"]
POSITIVE = (
    "--itl-slo-ms", "--death-bound-s", "--drain-timeout-s", "--transfer-deadline-s", "--max-sequences",
    "--chunk-tokens",
)  # fmt: skip


@pytest.mark.parametrize("flag", POSITIVE)
def test_a_number_that_is_not_positive_and_finite_is_refused_by_its_flag(flag: str) -> None:
    for value in ("0", "-1") if flag in ("--max-sequences", "--chunk-tokens") else ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"{flag} .* is not a positive number"):
            parse_arguments([*NEEDED, flag, value])
