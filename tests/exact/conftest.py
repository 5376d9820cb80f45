"""The prompts with their reference tokens, and the table that is printed at the end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.exact.prompts import long_prompts, mt_bench_file, mt_bench_prompts
from tests.exact.reference import Case, Reference, demo_reference, template_ids

MAX_TOKENS = 64
COLUMNS = ("configuration", "prompts", "tokens", "exact", "ties", "MB moved", "chunks", "preempted", "seconds")


@dataclass(frozen=True)
class Row:
    """What one configuration did."""

    configuration: str
    prompts: int
    tokens: int
    exact: int
    ties: int
    bytes_moved: int
    chunks: int
    preemptions: int
    seconds: float

    def cells(self) -> tuple[str, ...]:
        numbers = (self.prompts, self.tokens, self.exact, self.ties, f"{self.bytes_moved / 1e6:.1f}", self.chunks)
        return (self.configuration, *map(str, numbers), str(self.preemptions), f"{self.seconds:.0f}")


ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[ROWS]:
        table = [COLUMNS, *(row.cells() for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        terminalreporter.section("token for token against transformers generate (greedy, float32)")
        for first, *rest in table:
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            terminalreporter.write_line(f"{first.ljust(widths[0])}  {numbers}")


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return request.config.stash[ROWS]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return demo_reference()


@pytest.fixture(scope="session")
def cases(reference: Reference) -> list[Case]:
    """80 first turns of MT-Bench with 10 long own prompts spread among them."""
    if not mt_bench_file().exists():
        pytest.skip(f"{mt_bench_file()} is absent; set PDSERVE_SHARED to the directory that holds prompts/")
    prompts = list(mt_bench_prompts())
    for number, prompt in enumerate(long_prompts()):
        prompts.insert(9 * number + 4, prompt)
    ids = {prompt.name: template_ids(prompt.messages) for prompt in prompts}
    reference.precompute(list(ids.values()), MAX_TOKENS)
    return [Case(p.name, p.messages, ids[p.name], reference.output(ids[p.name], MAX_TOKENS)) for p in prompts]
