"""The KV block pool: which blocks are free, owned or only kept for reuse. Integers only.

Every block is in exactly one of three places:

    free      nobody refers to it and its content means nothing
    owned     ``references[b] >= 1`` sequences read or write it
    cached    nobody refers to it, but the prefix cache knows its content; evicted when short

                allocate                     free, not kept
        free ------------------> owned ------------------------> free
          ^                      ^   |
          |  evict (LRU)   share |   | free, kept
          +------------- cached <----+

Eviction takes the block that was released longest ago. A sequence refers to its whole chain of
blocks and releases the deepest first, so a block always lies before its parent in that order: the
leaves of the prefix tree go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from headrace.core.errors import InternalError


class BlockPool:
    """Ids and reference counts of ``num_blocks`` KV blocks.

    Args:
        num_blocks: blocks in the pool, ids 0 to ``num_blocks - 1``.
        num_first: ids below it may hold a sequence's first block; all by default. They are given
            out for others, too, once no other one is free.
        on_evict: called with a cached block's id when the pool takes it back, before it is reused.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None] | None = None,
        num_first: int | None = None,
    ) -> None:
        if num_blocks < 1:
            raise InternalError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._kept = [False] * num_blocks
        # Stacks: the block freed last is reused first, so that few pages are ever touched.
        self._num_first = num_blocks if num_first is None else num_first
        self._free_first = list(range(self._num_first - 1, -1, -1))
        self._free_other = list(range(num_blocks - 1, self._num_first - 1, -1))
        self._cached: dict[int, None] = {}  # insertion order is the order of release

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out: free ones and cached ones."""
        return len(self._free_first) + len(self._free_other) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_kept(self) -> int:
        """Blocks whose content the prefix cache knows, owned or cached."""
        return sum(self._kept)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_kept(self, block: int) -> bool:
        """Whether the prefix cache knows the block's content, so that nobody may write to it."""
        return self._kept[block]

    def allocate(self, count: int, first: int = 0) -> list[int] | None:
        """Take ``count`` blocks with one reference each, or None if there are fewer.

        The first ``first`` of them may be the first blocks of sequences. Cached blocks are evicted
        only once no free block will do; nothing else changes when None is returned.
        """
        if count > self.num_available or not self._find_first(first):
            return None
        taken: list[int] = []
        for index in range(count):
            block = self._pop(index < first)
            self._references[block] = 1
            taken.append(block)
        return taken

    def _find_first(self, count: int) -> bool:
        """Evict until ``count`` blocks that may be first are free; False if there are not so many."""
        cached = sum(block < self._num_first for block in self._cached) if count else 0
        if len(self._free_first) + cached < count:
            return False
        while len(self._free_first) < count:
            self._push(self._evict())
        return True

    def _pop(self, first: bool) -> int:
        if first:
            return self._free_first.pop()
        if self._free_other:
            return self._free_other.pop()
        return self._free_first.pop() if self._free_first else self._evict()

    def _push(self, block: int) -> None:
        (self._free_first if block < self._num_first else self._free_other).append(block)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of ``blocks``, which must be owned or cached."""
        for block in blocks:
            if self._references[block] == 0 and block not in self._cached:
                raise InternalError(f"block {block} is free and cannot be shared")
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference for each mention of a block; release in the given order.

        A block mentioned twice loses two references and is queued once. Dropping more references
        than there are would take a block from another owner: it is an error, and nothing changes.

        Raises:
            InternalError: a block is mentioned more often than it is referred to.
        """
        for block, mentions in Counter(blocks).items():
            if mentions > self._references[block]:
                raise InternalError(
                    f"block {block} freed {mentions} times, but it has "
                    f"{self._references[block]} references"
                )
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._push(block)

    def keep(self, block: int) -> None:
        """Mark an owned block's content as known: once released it is cached rather than free."""
        if self._references[block] == 0:
            raise InternalError(f"block {block} has no owner and cannot be kept")
        self._kept[block] = True

    def drop_cached(self) -> int:
        """Evict every cached block, oldest first; return how many."""
        count = len(self._cached)
        for _ in range(count):
            self._push(self._evict())
        return count

    def check(self) -> None:
        """Verify that free, cached and owned blocks partition the pool.

        Raises:
            InternalError: with the first block that is in two places, or in none.
        """
        free = Counter(self._free_first + self._free_other)
        for block in range(self.num_blocks):
            places = free[block] + (block in self._cached) + (self._references[block] > 0)
            if places != 1:
                raise InternalError(
                    f"block {block} is in {places} places: {free[block]} times free, cached "
                    f"{block in self._cached}, references {self._references[block]}"
                )
            if self._kept[block] and free[block]:
                raise InternalError(f"block {block} is free but still known to the prefix cache")
        if self.num_available > self.num_blocks:
            raise InternalError("the free list holds ids outside the pool")

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self._kept[block] = False
        if self._on_evict is not None:
            self._on_evict(block)
        return block
