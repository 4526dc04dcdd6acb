"""Records of one engine step: what the scheduler plans, what the runner returns, what was measured.

``StepStats`` is versioned and has a JSON schema in docs/reference, since other tools read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.core.request import TokenLogprob

STEP_STATS_VERSION = 1
UNKNOWN = -1  # a token that the device chooses in the step before


# Rows of a step that are projected and attended at a time. Queries, keys and attention's outputs take 66 KB
# a row with gpt-oss's heads, the next layer's input 12; 2,048 rows keep the tensor cores busy.
PIECE_ROWS = 2048


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one sequence that this step computes.

    ``block_ids`` are the sequence's KV blocks, enough to hold ``start + len(token_ids)`` tokens.
    ``sample``: the last token's logits give the sequence's next token in this step.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int  # position of the first of them
    block_ids: tuple[int, ...]
    sample: bool


@dataclass(frozen=True)
class StepPlan:
    """One iteration: decode chunks (one token) come first, then prefill chunks.

    ``ahead``: planned before the step before it was known; its tokens are ``UNKNOWN``, each is what the
    same row of that step chooses.
    """

    step: int
    chunks: tuple[ScheduledChunk, ...]
    block_copies: tuple[tuple[int, int], ...] = ()  # (source, destination), before anything else
    ahead: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)


@dataclass(frozen=True)
class SampledToken:
    """The token that one sequence got in this step, with log-probabilities where asked for."""

    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens at ``start``, ``start + 1``, ... of one sequence."""

    seq_id: int
    start: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class StepOutput:
    """What the runner returns for a plan; ``scheduler.commit`` takes it.

    ``stopped``: sequences whose new token ended them, by an end token, a stop id or a stop string.
    """

    step: int
    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    stopped: frozenset[int] = frozenset()


@dataclass(frozen=True)
class MovedBytes:
    """Bytes by memory: GPU memory, the link, host memory."""

    hbm: int = 0
    pcie: int = 0
    dram: int = 0


@dataclass(frozen=True)
class ClassStats:
    """One FLOP class within one step: calls, floating-point operations, bytes, measured seconds."""

    id: str
    calls: int
    flops: int
    bytes: MovedBytes
    seconds: float


@dataclass(frozen=True)
class StepStats:
    """What one step did and how long it took."""

    step: int
    phase: Literal["prefill", "decode", "mixed"]
    batch: int  # sequences in the step
    tokens: int
    seconds: float
    classes: tuple[ClassStats, ...] = field(default=())
    version: int = STEP_STATS_VERSION
