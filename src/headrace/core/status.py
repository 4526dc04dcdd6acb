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
    # planned bytes by memory ("host", "gpu") and purpose; see engine.resolved
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])


@dataclass(frozen=True)
class ExpertSnapshot:
    """A mixture's experts outside of the GPU's own weights; names in ``_total`` count since the start.

    Slots are places of one slice of an expert in GPU memory. ``bytes_total`` is by path: ``resident``
    (slices found in slots), ``fetched`` (missing ones over PCIe on demand), ``computed`` (missing ones
    on the CPU), ``promoted`` (over PCIe in its idle time), ``streamed`` (prefill). ``split`` is how many
    of 0, 1, 2, ... missing slices are fetched. A stall is a layer that waited for the CPU after
    everything else was done. Look-ups and hits are those of decoding steps.
    """

    slots_total: int = 0
    slots_used: int = 0
    slot_nbytes: int = 0
    pinned_nbytes: int = 0  # of slabs in host memory, which the GPU reads
    pageable_nbytes: int = 0  # of slabs in host memory, for the CPU only
    mapped_nbytes: int = 0  # of slabs in a file
    lookups_total: int = 0  # slices that layers asked for
    hits_total: int = 0
    bytes_total: Mapping[str, int] = field(default_factory=dict[str, int])
    split: tuple[int, ...] = ()
    rates_gbps: Mapping[str, float] = field(default_factory=dict[str, float])  # pcie, cpu: live
    stalls_total: int = 0
    stall_seconds_total: float = 0.0
    restarts_total: int = 0  # of the CPU's threads, after one died or hung

    @property
    def hit_rate(self) -> float:
        """Share of look-ups found in slots; 0 before the first."""
        return self.hits_total / self.lookups_total if self.lookups_total else 0.0


@dataclass(frozen=True)
class EngineSnapshot:
    """Gauges of this moment and counters since the engine started (names in ``_total``).

    ``experts``: None where a model has none, or keeps them with its other weights.
    """

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
    experts: ExpertSnapshot | None = None
