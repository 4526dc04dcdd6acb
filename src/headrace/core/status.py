"""What the engine says about itself: facts fixed at load, counters that change with every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Choice:
    """One resolved setting and why it has this value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class EngineInfo:
    """What was loaded and how; fixed for the engine's life."""

    model: str
    family: str
    context: int  # tokens a sequence may hold
    vocab: int
    weights_nbytes: int
    kv_nbytes: int
    kv_format: str
    block_tokens: int
    threads: int
    backends: Mapping[str, str]  # op name -> back-end
    choices: tuple[Choice, ...]
    load_s: float


@dataclass(frozen=True)
class EngineSnapshot:
    """Gauges of this moment and counters since the engine started (names in ``_total``)."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    requests_finished: Mapping[str, int] = field(default_factory=dict[str, int])  # by finish reason
    requests_aborted_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
