"""The prefix cache: which full KV block holds which tokens after which prefix. Integers only.

Blocks are hash-consed: a full block is known by (its parent, its tokens), the first block of a
prompt by (its key space, its tokens). Equal keys share one block. The hash only finds candidates;
tokens and parent are always compared, so a collision costs time and never an answer.

        space "" -- [0..15] -- [16..31] -- [32..47]
                            \\- [16..30, 99]
        space "tenant-7" -- [0..15]              (same tokens, never shared)

Every layer keeps all of its pages, those with a sliding window too, so that a prefix can be taken
up again at any block boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from headrace.core.errors import InternalError


@dataclass(frozen=True)
class CacheSpace:
    """Prompts share blocks within one space only. Salt and adapter are separate names.

    ``kv``: the cache's format and whatever else its bytes depend on (the residual directions' hash).
    """

    salt: str = ""
    adapter: str = ""
    kv: str = ""


@dataclass(eq=False)
class PrefixNode:
    """One cached block: ``tokens`` (a full block of them) after ``parent``."""

    serial: int  # never reused, so that a key made from it cannot outlive the node
    parent: CacheSpace | PrefixNode
    tokens: tuple[int, ...]
    block: int
    num_children: int = 0

    @property
    def depth(self) -> int:
        """Blocks from the start of the prompt to the end of this one."""
        depth, node = 1, self.parent
        while isinstance(node, PrefixNode):
            depth, node = depth + 1, node.parent
        return depth


class PrefixCache:
    """Finds the cached blocks of a token sequence.

    Args:
        block_tokens: tokens per block.
        hash_key: hashes (parent, tokens) keys; tests put a constant here.
    """

    def __init__(self, block_tokens: int, hash_key: Callable[[Hashable], int] = hash) -> None:
        self.block_tokens = block_tokens
        self._hash_key = hash_key
        self._by_hash: dict[int, list[PrefixNode]] = {}
        self._by_block: dict[int, PrefixNode] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, tokens: Sequence[int], space: CacheSpace, max_tokens: int) -> list[PrefixNode]:
        """Return the longest chain of cached full blocks that ``tokens`` starts with.

        The chain covers at most ``max_tokens`` tokens; callers pass ``len(tokens) - 1``, because
        the logits of the last token have to be computed.
        """
        size = self.block_tokens
        chain: list[PrefixNode] = []
        parent: CacheSpace | PrefixNode = space
        for end in range(size, min(max_tokens, len(tokens)) + 1, size):
            node = self._find(parent, tuple(tokens[end - size : end]))
            if node is None:
                break
            chain.append(node)
            parent = node
        return chain

    def insert(
        self, parent: CacheSpace | PrefixNode, tokens: tuple[int, ...], block: int
    ) -> PrefixNode:
        """Make a computed block known, and return the node that stands for its content.

        If the content is already known the existing node comes back, with another block: the caller
        then uses that one and releases its own.
        """
        if len(tokens) != self.block_tokens:
            raise InternalError(
                f"only full blocks are cached: {len(tokens)} tokens in one of {self.block_tokens}"
            )
        known = self._find(parent, tokens)
        if known is not None:
            return known
        if block in self._by_block:
            raise InternalError(f"block {block} already holds another cached prefix")
        node = PrefixNode(self._next_serial, parent, tokens, block)
        self._next_serial += 1
        self._by_hash.setdefault(self._hash(parent, tokens), []).append(node)
        self._by_block[block] = node
        if isinstance(parent, PrefixNode):
            parent.num_children += 1
        return node

    def forget(self, block: int) -> None:
        """Drop the node of an evicted block, which must be a leaf."""
        node = self._by_block[block]
        if node.num_children:
            raise InternalError(f"block {block} evicted before its {node.num_children} children")
        del self._by_block[block]
        key = self._hash(node.parent, node.tokens)
        bucket = self._by_hash[key]
        bucket.remove(node)
        if not bucket:
            del self._by_hash[key]
        if isinstance(node.parent, PrefixNode):
            node.parent.num_children -= 1

    def _hash(self, parent: CacheSpace | PrefixNode, tokens: tuple[int, ...]) -> int:
        return self._hash_key((parent.serial if isinstance(parent, PrefixNode) else parent, tokens))

    def _find(self, parent: CacheSpace | PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        for node in self._by_hash.get(self._hash(parent, tokens), ()):
            same_parent = (
                node.parent is parent if isinstance(parent, PrefixNode) else node.parent == parent
            )
            if same_parent and node.tokens == tokens:
                return node
        return None
