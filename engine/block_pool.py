"""The block pool: who holds which KV block, and which full blocks can be found again by their content.

Pure Python, no tensors. Every block is in exactly one of three states:

    free      no reference, not indexed; the one that was freed last is used first: what it lies in is still in a
              cache, and a pool that is larger than the need takes no memory
    cached    no reference, indexed by the hash of its content and everything before it; evictable, oldest first
    held      one reference for every block table it stands in

Keys are SHA-256 chains: key(i) = SHA-256(key(i - 1) ‖ token ids of block i), key(-1) = SHA-256 over whatever else
changes the content (model fingerprint, KV dtype, the caller's cache salt).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..transfer.errors import OutOfBlocks


def root_key(*parts: str) -> bytes:
    """The chain's start: a hash over everything but the tokens. Each part is prefixed with its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, up_to: int) -> None:
    """Append the keys of the full blocks of tokens[:up_to] that `keys` does not have yet."""
    for index in range(len(keys), up_to // block_size):
        block = array("q", tokens[index * block_size : (index + 1) * block_size])
        keys.append(hashlib.sha256((keys[-1] if keys else root) + block.tobytes()).digest())


@dataclass(frozen=True)
class PoolCounts:
    free: int
    cached: int
    held: int


class BlockPool:
    """Reference counts, the prefix index and LRU eviction over `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = list(reversed(range(num_blocks)))  # the next one at the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can get: free ones and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> PoolCounts:
        return PoolCounts(len(self._free), len(self._cached), self.num_blocks - self.num_available)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest indexed run of `keys`; takes no reference."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, all or nothing. Raises OutOfBlocks."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} available of {self.num_blocks}")
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._key_of.pop(block)]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; cached ones become held. Free blocks cannot be retained."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block. The last of a chain becomes evictable first: it is useless alone."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than held"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def index(self, block: int, key: bytes) -> None:
        """Make a full, completely computed block findable. A second copy of known content stays unindexed."""
        assert self._references[block] > 0
        if self.prefix_caching and key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def clear_index(self) -> None:
        """Forget all cached content (after a failed step left blocks in doubt)."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that states partition the pool and reference counts equal the block tables given."""
        counted = Counter(block for table in tables for block in table)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        for block in range(self.num_blocks):
            references = self._references[block]
            assert references == counted[block], f"block {block}: {references} references, in {counted[block]} tables"
            assert (references == 0) == (block in free or block in cached), f"block {block} is in no state or in two"
            assert not (block in free and block in self._key_of), f"free block {block} is indexed"
            assert block not in cached or block in self._key_of, f"cached block {block} is not indexed"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "the index disagrees with itself"


class BlockTable:
    """The blocks of one sequence, in order, and how many of its tokens have complete KV in them.

    Whoever makes a BlockTable releases it; releasing twice is harmless.
    """

    def __init__(self, pool: BlockPool, root: bytes) -> None:
        self._pool = pool
        self._root = root
        self._keys: list[bytes] = []
        self._num_indexed = 0
        self.blocks = array("q")  # numbers side by side: a step reads them without a look at each
        self.num_computed = 0

    @property
    def capacity_tokens(self) -> int:
        return len(self.blocks) * self._pool.block_size

    def match_prefix(self, tokens: Sequence[int]) -> int:
        """Take references on the longest cached prefix in whole blocks, at most len(tokens) - 1 tokens.

        Returns the number of tokens found. Only on an empty table.
        """
        assert not self.blocks
        if self._pool.prefix_caching:
            extend_keys(self._keys, self._root, tokens, self._pool.block_size, len(tokens))
            usable = self._keys[: (len(tokens) - 1) // self._pool.block_size]
            self.blocks = array("q", self._pool.lookup(usable))
            self._pool.retain(self.blocks)
        self._num_indexed = len(self.blocks)
        self.num_computed = self.capacity_tokens
        return self.num_computed

    def key_after(self, num_tokens: int) -> bytes | None:
        """Key of the full block that follows the first `num_tokens` (a block multiple), if there is one."""
        index = num_tokens // self._pool.block_size
        return self._keys[index] if index < len(self._keys) else None

    @property
    def keys(self) -> Sequence[bytes]:
        return self._keys

    def num_missing_blocks(self, num_tokens: int) -> int:
        return max(0, self._pool.blocks_for(num_tokens) - len(self.blocks))

    def grow(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in all. Raises OutOfBlocks and changes nothing if they do not fit."""
        self.blocks.extend(self._pool.allocate(self.num_missing_blocks(num_tokens)))

    def commit(self, tokens: Sequence[int], num_computed: int) -> None:
        """The KV of tokens[:num_computed] is complete: index the blocks that became full."""
        assert self.num_computed <= num_computed <= self.capacity_tokens
        self.num_computed = num_computed
        if not self._pool.prefix_caching:
            return
        full = num_computed // self._pool.block_size
        if full > self._num_indexed:
            extend_keys(self._keys, self._root, tokens, self._pool.block_size, num_computed)
            for index in range(self._num_indexed, full):
                self._pool.index(self.blocks[index], self._keys[index])
            self._num_indexed = full

    def fork(self) -> tuple[BlockTable, tuple[int, int] | None]:
        """A table with the same computed tokens: full blocks are shared, a partial last one is copied.

        Returns the new table and (source block, target block) to copy, if there is one. Raises OutOfBlocks.
        """
        full, partial = divmod(self.num_computed, self._pool.block_size)
        last = self._pool.allocate(1 if partial else 0)
        other = BlockTable(self._pool, self._root)
        self._pool.retain(self.blocks[:full])
        other.blocks = self.blocks[:full] + array("q", last)
        other.num_computed = self.num_computed
        other._keys = self._keys[:full]
        other._num_indexed = min(self._num_indexed, full)
        return other, (self.blocks[full], last[0]) if partial else None

    def sibling(self) -> BlockTable:
        """An empty table for the same tokens."""
        other = BlockTable(self._pool, self._root)
        other._keys = list(self._keys)
        return other

    def release(self) -> None:
        """Give every reference back and become empty. The keys stay: the sequence's tokens only ever grow."""
        blocks, self.blocks = self.blocks, array("q")
        self._num_indexed, self.num_computed = 0, 0
        self._pool.release(blocks)
