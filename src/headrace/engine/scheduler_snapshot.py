"""What a scheduler knows of the engine's state, for whoever watches it."""

from __future__ import annotations

from headrace.core.status import EngineSnapshot
from headrace.engine.scheduler import Scheduler


def scheduler_snapshot(scheduler: Scheduler) -> EngineSnapshot:
    """Its gauges of this moment and its counters; the other fields are those of an idle engine."""
    counters, pool = scheduler.counters, scheduler.tables.pool
    return EngineSnapshot(
        step=counters.steps,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        kv_blocks_total=pool.num_blocks,
        kv_blocks_used=pool.num_owned,
        kv_blocks_cached=pool.num_cached,
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        prefix_query_tokens_total=counters.prefix_query_tokens,
        prefix_hit_tokens_total=counters.prefix_hit_tokens,
        preemptions_total=counters.preemptions,
        steps_total=counters.steps,
    )
