"""How long a prompt's chunks are, where experts are streamed for each.

A chunk of T tokens brings every expert that is not resident once, S seconds, while the GPU computes, c
seconds a token: it takes max(S, c T), and a token of a long prompt max(S / T, c). (Beside a slow link both
paths may be faster, ``experts.prefill``; then that is what a chunk takes.) A longer chunk needs more
memory, which the slots of the expert cache give up, and so a decoding step takes d(T) seconds, a little
more with each doubling. Both count, for R tokens of prompts that are computed for each token of an answer:

    V(T) = d(T) + R max(S / T, c)

A chunk is doubled while V falls and prompts gain a tenth or more. All chunks up to S / c take the same
time, so those who decode meanwhile wait no longer for a longer one: only beyond that a chunk beside others
is kept shorter.

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens that are tried. Longer ones gain less than a hundredth of what is left, and who asks something else
# meanwhile waits for all of it.
CANDIDATES = (2048, 4096, 8192, 16_384)
# Tokens of prompts for each token of an answer, prefixes that are cached left out: an agent reads some files
# and tool outputs for each edit. Estimate.
PROMPT_TOKENS = 8
# Tokens of past that a prompt's rows see on average: of prompts up to twice as long.
MEAN_PAST = 8192
# A doubling that takes less than this off a prompt's time is not worth the wait of whoever comes next.
NOTABLE = 0.1
# Beside others' decoding a chunk may take so much longer than the shortest streamed one.
PATIENCE = 1.25
# Prompts are a little longer than round numbers (templates, a question behind a file): this part of a chunk
# more is allowed for, so that they do not stream everything again for the rest.
SLACK = 8


@dataclass(frozen=True)
class ChunkPrice:
    """What chunks of ``tokens`` cost.

    chunk_s: seconds of one; decode_s: of a decoding step with the slots that they leave; workspace_nbytes
    """

    tokens: int
    chunk_s: float
    decode_s: float
    workspace_nbytes: int

    @property
    def seconds(self) -> float:
        """V, of the module's description."""
        return self.decode_s + PROMPT_TOKENS * self.token_s

    @property
    def token_s(self) -> float:
        """Of a long prompt."""
        return self.chunk_s / self.tokens


@dataclass(frozen=True)
class ChunkChoice:
    """tokens: of a chunk while nobody decodes; beside: while others do; tail: of a prompt's last chunk, if it
    goes on both paths for less than another stream; 0: never."""

    tokens: int
    beside: int
    tail: int
    reason: str


def choose_chunk(prices: Sequence[ChunkPrice]) -> ChunkPrice:
    """The longest chunk that is worth it. prices: by rising tokens."""
    chosen = prices[0]
    for price in prices[1:]:
        notable = price.token_s <= (1 - NOTABLE) * chosen.token_s
        if notable and price.seconds < chosen.seconds:
            chosen = price
    return chosen


def tokens_beside(prices: Sequence[ChunkPrice], chosen: ChunkPrice) -> int:
    """Tokens of a chunk while others decode: the most that hardly take longer than the fewest."""
    fast = [p.tokens for p in prices if p.chunk_s <= PATIENCE * prices[0].chunk_s]
    return min(chosen.tokens, max(fast))


def with_slack(tokens: int, longest: int) -> int:
    """What is planned for chunks of ``tokens``; longest: that a prompt can be."""
    return min(tokens + tokens // SLACK, max(longest, CANDIDATES[0]))


def reason_of(prices: Sequence[ChunkPrice], chosen: ChunkPrice) -> str:
    """Why, with numbers."""
    first = prices[0]
    more = (chosen.workspace_nbytes - first.workspace_nbytes) / 2**30
    told = [f"experts cross PCIe once for each chunk: {chosen.chunk_s:.2f} s"]
    rates = ", ".join(f"{p.tokens / p.chunk_s:,.0f} tok/s in {p.tokens:,}" for p in prices)
    told.append(f"prompts at {rates}")
    if chosen is not first:
        told.append(f"+{more:.2f} GiB of workspace")
    return "; ".join(told)


def next_chunk(remaining: int, most: int, tail: int) -> int:
    """Tokens of a prompt's next chunk, of which ``remaining`` are left.

    As few chunks as possible, equally long, since a chunk takes max(S, c T): no division into as many is
    faster. A rest of up to ``tail`` tokens is cheaper alone, on both paths.
    """
    if remaining <= most:
        return remaining
    whole, rest = divmod(remaining, most)
    if 0 < rest <= tail:
        return most
    return -(-remaining // (whole + (rest > 0)))
