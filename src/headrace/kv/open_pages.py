"""Which blocks are being filled, and where their bf16 rows lie meanwhile. Integers only.

A cache whose pages are sealed keeps the rows of an unfinished page in an *open* page of bf16. Slots
of open pages come in two kinds:

    shared   0 ... num_shared - 1                   pages that start and end within one step
    own      num_shared ... num_shared + num_own    pages that a later step goes on with

Own slots belong to blocks. A block that becomes full keeps its slot until the next step, so that
computing a step again finds the same rows; a block that its sequence gave back loses it when another
one needs a slot, or when the block itself is filled anew.

    next_step -> copy ... -> begin -> open_chunk ...     (begin again to compute the step again)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.errors import InternalError


@dataclass(frozen=True)
class OpenChunk:
    """The open pages of one chunk.

    slots: one for each page that the chunk writes to
    seals: (block, slot, 1 if it is the sequence's first page else 0) of those that become full
    """

    slots: tuple[int, ...]
    seals: tuple[tuple[int, int, int], ...]


class OpenPages:
    """Slots of open pages by block.

    Args:
        num_shared, num_own: slots of each kind (``core.kv_formats.pool_shape``).
        block_tokens: rows of a page.
        is_owned: whether some sequence refers to a block.
    """

    def __init__(
        self, num_shared: int, num_own: int, block_tokens: int, is_owned: Callable[[int], bool]
    ) -> None:
        self._size = block_tokens
        self._num_shared = num_shared
        self._is_owned = is_owned
        self._slot_of: dict[int, int] = {}
        self._free = list(range(num_shared + num_own - 1, num_shared - 1, -1))
        self._full: set[int] = set()  # sealed by the current step
        self._next_shared = 0

    @property
    def num_open(self) -> int:
        """Blocks that have a slot."""
        return len(self._slot_of)

    def next_step(self) -> None:
        """Give up the slots of the blocks that the last step sealed."""
        for block in list(self._full):
            self._drop(block)

    def take_back(self) -> None:
        """The step that was begun last is not computed: the pages that it would have sealed stay open.

        Whoever gets such a block next fills it, and would lose its rows with the step behind.
        """
        self._full.clear()

    def begin(self) -> None:
        """Start computing a step, or some of its chunks, again or for the first time."""
        self._next_shared = 0

    def open_chunk(self, start: int, count: int, blocks: Sequence[int]) -> OpenChunk:
        """Find or take slots for the pages of positions ``start`` to ``start + count - 1``."""
        slots: list[int] = []
        seals: list[tuple[int, int, int]] = []
        end, size = start + count, self._size
        for page in range(start // size, -(-end // size)):
            block, fresh, full = blocks[page], start <= page * size, end >= (page + 1) * size
            if fresh and full:
                slot = self._shared(block)
            elif fresh:
                slot = self._take(block)
            else:
                slot = self._known(block)
            slots.append(slot)
            if full:
                seals.append((block, slot, int(page == 0)))
                if block in self._slot_of:
                    self._full.add(block)
        return OpenChunk(tuple(slots), tuple(seals))

    def copy(self, source: int, target: int) -> tuple[int, int]:
        """Give ``target``, which replaces the unfinished ``source``, a slot; return both slots."""
        known = self._known(source)
        return known, self._take(target)

    def check(self, max_blocks: int) -> None:
        """Verify that slots are conserved and that at most ``max_blocks`` owned blocks hold one."""
        owned = sum(self._is_owned(block) for block in self._slot_of)
        slots = [*self._slot_of.values(), *self._free]
        if len(set(slots)) != len(slots) or owned > max_blocks:
            raise InternalError(
                f"open pages: {len(self._slot_of)} blocks hold slots, {owned} of them owned, "
                f"{len(self._free)} are free, {len(slots) - len(set(slots))} are in two places"
            )

    def _shared(self, block: int) -> int:
        if block in self._slot_of and block not in self._full:
            self._drop(block)
        if self._next_shared == self._num_shared:
            raise InternalError(f"more than {self._num_shared} pages start and end in one step")
        self._next_shared += 1
        return self._next_shared - 1

    def _known(self, block: int) -> int:
        slot = self._slot_of.get(block)
        if slot is None:
            raise InternalError(f"block {block} is sealed, or was never begun: it cannot be filled")
        return slot

    def _take(self, block: int) -> int:
        if block in self._slot_of:
            return self._slot_of[block]
        if not self._free:
            for stale in [b for b in self._slot_of if not self._is_owned(b)]:
                self._drop(stale)
        if not self._free:
            raise InternalError(f"no open page is left for block {block}")
        self._slot_of[block] = slot = self._free.pop()
        return slot

    def _drop(self, block: int) -> None:
        self._free.append(self._slot_of.pop(block))
        self._full.discard(block)
