"""Where the fields of a request to the CPU's expert service lie in one block of pinned memory.

The GPU (or the host, in tests) fills ``header`` to ``x`` and writes ``seq`` last, behind a system-wide
fence; the service computes, writes ``out`` and stores the same number in ``ack``. ``abort`` becomes
non-zero when either side gives up; every wait on the block is bounded by it.

All fields are little-endian and 64-byte aligned; offsets are in bytes from the block's start:

- ``seq``, ``ack``, ``abort``: int32, each alone in its cache line, so that polling one does not
  disturb the others
- ``ready``: int32 [READY_PARTS]: the number of the x whose part of READY_COLS columns is there, written
  behind it; a request of one token names it, and the service prepares x as soon as all parts have one
  number. The layers of all steps have numbers that follow each other from 1 on: (number - 1) % layers is
  the layer
- ``header``: int32 [16]: layer, num_tokens, num_items, num_pairs, number of x (0: all of x
  is there), then zeros
- ``items``: int32 [max_items, 4]: expert, slice, first_pair, num_pairs; sorted by (expert, slice)
- ``pair_token``: int32 [max_pairs]; ``pair_weight``: float32 [max_pairs]: the tokens that use an
  item's expert, ascending. Items of one expert share one range of pairs.
- ``x``: float32 [max_tokens, hidden], the normalised rows
- ``out``: float32 [max_tokens, hidden], rows 0 to num_tokens - 1: the sum over the items of weight *
  partial output; zeros where a token has no item

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.experts.slab import round_up

CACHE_LINE = 64
HEADER_INTS = 16
ITEM_INTS = 4

# Indices into the header.
HEADER_LAYER = 0
HEADER_NUM_TOKENS = 1
HEADER_NUM_ITEMS = 2
HEADER_NUM_PAIRS = 3
HEADER_X_NUMBER = 4

READY_COLS = 256
READY_PARTS = 16  # longer rows have no number

# Indices into an item.
ITEM_EXPERT = 0
ITEM_SLICE = 1
ITEM_FIRST_PAIR = 2
ITEM_NUM_PAIRS = 3


@dataclass(frozen=True)
class RequestBlock:
    """Sizes and offsets of one block. Make it with ``request_block``."""

    max_tokens: int
    max_items: int
    max_pairs: int
    hidden: int
    items: int
    pair_token: int
    pair_weight: int
    x: int
    out: int
    nbytes: int

    seq: int = 0
    ack: int = CACHE_LINE
    abort: int = 2 * CACHE_LINE
    ready: int = 3 * CACHE_LINE
    header: int = 4 * CACHE_LINE

    @property
    def ready_parts(self) -> int:
        """Parts of a row of x that are numbered, 0 for rows that are not."""
        parts = -(-self.hidden // READY_COLS)
        return parts if parts <= READY_PARTS else 0


def request_block(
    *, max_tokens: int, top_k: int, num_experts: int, num_slices: int, hidden: int
) -> RequestBlock:
    """Lay out the block of a model: room for every slice of every expert that a step can ask for.

    Raises:
        ConfigError: a size is not positive.
    """
    sizes = {
        "max_tokens": max_tokens,
        "top_k": top_k,
        "num_experts": num_experts,
        "num_slices": num_slices,
        "hidden": hidden,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"request block: {name} is {size}, expected at least 1")
    max_pairs = max_tokens * top_k
    max_items = min(max_pairs, num_experts) * num_slices
    items = 4 * CACHE_LINE + 4 * HEADER_INTS

    def line(offset: int) -> int:
        return round_up(offset, CACHE_LINE)

    pair_token = line(items + 4 * ITEM_INTS * max_items)
    pair_weight = line(pair_token + 4 * max_pairs)
    x = line(pair_weight + 4 * max_pairs)
    out = line(x + 4 * max_tokens * hidden)
    return RequestBlock(
        max_tokens=max_tokens,
        max_items=max_items,
        max_pairs=max_pairs,
        hidden=hidden,
        items=items,
        pair_token=pair_token,
        pair_weight=pair_weight,
        x=x,
        out=out,
        nbytes=line(out + 4 * max_tokens * hidden),
    )
