"""Block tables of sequences: how they get, share, copy, publish and give back KV blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.core.errors import InternalError
from headrace.engine.sequence import Sequence
from headrace.kv.block_pool import BlockPool
from headrace.kv.prefix import PrefixCache


class BlockTables:
    """One pool and its prefix cache, seen from the sequences.

    The invariant: a block that another sequence refers to, or that the prefix cache knows, is never
    written. ``extend`` puts a copy in its place before the write.

    Args:
        sealed: blocks are quantised once full; ``num_first``: how many may start a sequence.
    """

    def __init__(
        self,
        num_blocks: int,
        prefix: PrefixCache,
        use_cache: bool,
        *,
        sealed: bool = False,
        num_first: int | None = None,
    ) -> None:
        self.prefix = prefix
        self.pool = BlockPool(num_blocks, on_evict=prefix.forget, num_first=num_first)
        self._sealed = sealed
        self.size = prefix.block_tokens
        self._use_cache = use_cache

    def num_missing(self, seq: Sequence) -> int:
        """Most blocks that all tokens of ``seq`` may still need: one of them for a copy."""
        return -(-len(seq.tokens) // self.size) - len(seq.blocks) + 1

    def extend(self, seq: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Give ``seq`` writable blocks for its next ``count`` positions, or change nothing.

        Copies that the step has to make first are appended to ``copies``. Returns False if the pool
        has too few blocks.
        """
        first = seq.num_computed // self.size  # the block that is written first
        copy = first < len(seq.blocks) and (
            self.pool.references(seq.blocks[first]) > 1 or self.pool.is_kept(seq.blocks[first])
        )
        missing = -(-(seq.num_computed + count) // self.size) - len(seq.blocks)
        starts = first == 0 and (copy or not seq.blocks)
        new = self.pool.allocate(max(missing, 0) + copy, first=int(starts))
        if new is None:
            return False
        if copy:
            source, seq.blocks[first] = seq.blocks[first], new.pop(0)
            copies.append((source, seq.blocks[first]))
            self.pool.free([source])
        seq.blocks.extend(new)
        return True

    def extend_ahead(self, seqs: Iterable[Sequence]) -> bool:
        """Give each of ``seqs`` a writable block for the position behind its next one, or change nothing.

        That one is being computed, so its block is there. False where a copy would have to be made, or
        where the pool has too few blocks.
        """
        without: list[Sequence] = []
        for seq in seqs:
            index = (seq.num_computed + 1) // self.size
            if index == len(seq.blocks):
                without.append(seq)
            elif self.pool.references(seq.blocks[index]) > 1 or self.pool.is_kept(
                seq.blocks[index]
            ):
                return False
        new = self.pool.allocate(len(without))
        if new is None:
            return False
        for seq, block in zip(without, new, strict=True):
            seq.blocks.append(block)
        return True

    def release(self, seq: Sequence) -> None:
        """Give all blocks back, the deepest first, so that leaves are evicted before parents."""
        self.pool.free(seq.blocks[::-1])
        seq.blocks = []
        seq.nodes = []
        seq.num_computed = 0

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's full, computed blocks known to the prefix cache.

        Only once they are computed, so that nobody counts on content that is not there yet. If an
        equal block is known already the sequence moves over to it and gives its own back.
        """
        if not self._use_cache:
            return
        for i in range(len(seq.nodes), seq.num_computed // self.size):
            own = seq.blocks[i]
            tokens = tuple(seq.tokens[i * self.size : (i + 1) * self.size])
            node = self.prefix.insert(seq.cache_parent, tokens, own)
            if node.block == own:
                self.pool.keep(own)
            else:
                self.pool.share([node.block])
                self.pool.free([own])
                seq.blocks[i] = node.block
            seq.nodes.append(node)

    def share_cached(self, seq: Sequence) -> None:
        """Start ``seq``, which has no blocks, from the cached prefix of its tokens.

        One token at least is left to compute, for its logits.
        """
        if not self._use_cache or seq.wants_prompt_logprobs:
            return
        seq.nodes = self.prefix.match(seq.tokens, seq.group.space, len(seq.tokens) - 1)
        seq.blocks = [n.block for n in seq.nodes]
        self.pool.share(seq.blocks)
        seq.num_computed = len(seq.blocks) * self.size

    def share_prompt(self, seq: Sequence, source: Sequence) -> None:
        """Start ``seq``, which has no blocks, from the prompt that its sibling has computed.

        Where blocks are sealed once they are full, a full one cannot be written to again: then
        ``seq`` computes all of that block's tokens itself.
        """
        seq.num_computed = min(seq.group.num_prompt, len(seq.tokens) - 1)
        begun = seq.num_computed // self.size
        if self._sealed and source.num_computed >= (begun + 1) * self.size:
            seq.num_computed = begun * self.size
        seq.blocks = source.blocks[: -(-seq.num_computed // self.size)]
        seq.nodes = source.nodes[: seq.num_computed // self.size]
        self.pool.share(seq.blocks)

    def check(self, owners: Iterable[Sequence]) -> None:
        """Verify that the pool is partitioned and that ``owners`` hold exactly its references.

        Raises:
            InternalError: an invariant does not hold.
        """
        self.pool.check()
        expected: Counter[int] = Counter()
        for seq in owners:
            expected.update(seq.blocks)
            if any(n.block != b for n, b in zip(seq.nodes, seq.blocks, strict=False)):
                raise InternalError(f"sequence {seq.seq_id} lost the block of a prefix node")
        for block in range(self.pool.num_blocks):
            if self.pool.references(block) != expected[block]:
                raise InternalError(
                    f"block {block} has {self.pool.references(block)} references and "
                    f"{expected[block]} owners"
                )
        if len(self.prefix) != self.pool.num_kept:
            raise InternalError(
                f"the prefix cache knows {len(self.prefix)} blocks, the pool {self.pool.num_kept}"
            )
