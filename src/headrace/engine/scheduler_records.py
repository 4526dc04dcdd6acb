"""What a scheduler is told, what it counts, and what it says of sequences that end."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.request import FinishReason


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits, all resolved: see ``engine.resolve``.

    context: tokens a sequence may hold, prompt and answer together
    max_batch_tokens: tokens per step, at least ``max_num_seqs``
    beside_tokens: likewise, of steps in which sequences decode; None: the same
    tail_tokens: a prompt that takes several steps has equally long chunks, or a last one of up to so many
        tokens (``experts.chunk_choice``); None: chunks as long as possible
    sealed: blocks are quantised when they are full
    num_first: blocks that may be the first of a sequence, None for all
    kv_key: what cached prefixes depend on beside their tokens
    """

    num_blocks: int
    block_tokens: int
    context: int
    max_batch_tokens: int
    max_num_seqs: int
    prefix_cache: bool = True
    sealed: bool = False
    num_first: int | None = None
    kv_key: str = ""
    beside_tokens: int | None = None
    tail_tokens: int | None = None


@dataclass
class SchedulerCounters:
    """Totals since the start; they only grow."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Finished:
    """A sequence that ``commit`` ended; ``last`` if no sequence of its request is left."""

    seq_id: int
    reason: FinishReason
    last: bool
