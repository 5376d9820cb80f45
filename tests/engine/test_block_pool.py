"""The block pool keeps every block in exactly one state, and finds content again only when it is the same content."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.block_pool import BlockPool, BlockTable, root_key
from pdserve.transfer.errors import OutOfBlocks

ROOT = root_key("model", "float32", "")


def table_with(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> BlockTable:
    table = BlockTable(pool, root)
    table.match_prefix(tokens)
    table.grow(len(tokens))
    table.commit(tokens, len(tokens))
    return table


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 2)
    table = BlockTable(pool, ROOT)
    table.grow(6)
    with pytest.raises(OutOfBlocks):
        table.grow(10)
    assert len(table.blocks) == 3
    assert pool.num_available == 1


def test_short_sequences_one_after_the_other_use_the_same_blocks() -> None:
    """A pool as large as memory allows is not walked through by requests that need a fraction of it."""
    pool = BlockPool(100, 4)
    used: set[int] = set()
    for request in range(50):
        tables = [table_with(pool, [request, choice]) for choice in range(3)]
        used.update(block for table in tables for block in table.blocks)
        for table in tables[:: -1 if request % 2 else 1]:
            table.release()
    assert len(used) == 3


def test_match_leaves_at_least_one_token_to_compute() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(8))
    table_with(pool, tokens).release()
    again = BlockTable(pool, ROOT)
    assert again.match_prefix(tokens) == 4
    longer = BlockTable(pool, ROOT)
    assert longer.match_prefix([*tokens, 9]) == 8


def test_different_salt_or_different_history_does_not_match() -> None:
    pool = BlockPool(8, 4)
    table_with(pool, list(range(9))).release()
    assert BlockTable(pool, root_key("model", "float32", "salt")).match_prefix(list(range(9))) == 0
    assert BlockTable(pool, ROOT).match_prefix([7, *range(1, 9)]) == 0


def test_root_key_separates_its_parts() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")


def test_incomplete_blocks_are_never_found() -> None:
    pool = BlockPool(8, 4)
    table = BlockTable(pool, ROOT)
    tokens = list(range(9))
    table.match_prefix(tokens)
    table.grow(9)
    table.commit(tokens, 7)
    assert BlockTable(pool, ROOT).match_prefix(tokens) == 4


def test_a_second_copy_of_a_block_stays_unindexed_and_returns_to_free() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(5))
    first = BlockTable(pool, ROOT)
    second = BlockTable(pool, ROOT)
    for table in (first, second):
        table.match_prefix(tokens)
        table.grow(5)
    first.commit(tokens, 5)
    second.commit(tokens, 5)
    second.release()
    assert pool.counts.cached == 0
    first.release()
    assert pool.counts.cached == 1


def test_eviction_takes_the_end_of_the_oldest_chain_first() -> None:
    pool = BlockPool(4, 2)
    tokens = list(range(9))
    table_with(pool, tokens[:8]).release()
    taken = BlockTable(pool, root_key("other"))
    taken.grow(2)
    assert BlockTable(pool, ROOT).match_prefix(tokens) == 6


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    table_with(pool, list(range(9))).release()
    assert pool.counts.cached == 0
    assert BlockTable(pool, ROOT).match_prefix(list(range(9))) == 0


def test_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    pool = BlockPool(8, 4)
    table = table_with(pool, list(range(6)))
    other, copy = table.fork()
    assert other.blocks[0] == table.blocks[0]
    assert copy == (table.blocks[1], other.blocks[1])
    pool.check_invariants([table.blocks, other.blocks])
    table.release()
    other.release()
    pool.check_invariants([])
    assert pool.counts.held == 0


def test_a_failed_fork_changes_nothing() -> None:
    pool = BlockPool(2, 4)
    table = table_with(pool, list(range(6)))
    with pytest.raises(OutOfBlocks):
        table.fork()
    pool.check_invariants([table.blocks])


class PoolMachine(RuleBasedStateMachine):
    """Random sequences of allocation, growth, commit, fork and release keep the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 3)
        self.tables: list[tuple[BlockTable, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14))
    def begin(self, tokens: list[int]) -> None:
        table = BlockTable(self.pool, ROOT)
        table.match_prefix(tokens)
        try:
            table.grow(len(tokens))
        except OutOfBlocks:
            table.release()
            return
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def compute(self, which: int, share: float) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        table.commit(tokens, table.num_computed + int(share * (len(tokens) - table.num_computed)))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), token=st.integers(0, 2))
    def extend(self, which: int, token: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        try:
            table.grow(len(tokens) + 1)
        except OutOfBlocks:
            return
        tokens.append(token)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        try:
            other, _ = table.fork()
        except OutOfBlocks:
            return
        if other.blocks:
            self.tables.append((other, tokens[: other.num_computed]))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        table, _ = self.tables.pop(which % len(self.tables))
        table.release()
        table.release()

    @invariant()
    def holds(self) -> None:
        self.pool.check_invariants([table.blocks for table, _ in self.tables])
        counts = self.pool.counts
        assert counts.free + counts.cached + counts.held == 12
        if not self.tables:
            assert counts.held == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
