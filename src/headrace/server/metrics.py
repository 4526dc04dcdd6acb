"""Prometheus metrics of one server: a registry per app, fed by the engine's snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace.core.request import OutputDelta
from headrace.core.status import EngineInfo, EngineSnapshot
from headrace.server.client import EngineState, Phase
from headrace.server.expert_metrics import ExpertMetrics, advance

# Seconds. First tokens range from milliseconds (warm, short) to minutes (long prompts on a CPU),
# tokens after them from a millisecond to about a second.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)

_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of accepted requests.",
    "generation_tokens_total": "Tokens generated.",
    "prefix_query_tokens_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_hit_tokens_total": "Prompt tokens found in the prefix cache.",
    "requests_aborted_total": "Requests cancelled before they finished.",
    "preemptions_total": "Sequences that gave their KV blocks back and were computed again.",
    "steps_total": "Engine steps.",
    "step_seconds_total": "Seconds spent in engine steps.",
}
_GAUGES = {
    "running": ("requests_running", "Sequences that are being computed."),
    "waiting": ("requests_waiting", "Requests that wait to be admitted."),
    "kv_blocks_total": ("kv_blocks", "KV blocks of the pool."),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks held by sequences."),
    "kv_blocks_cached": ("kv_blocks_cached", "Free KV blocks that hold a cached prefix."),
}


class Metrics:
    """All metrics of one app. Counters follow the snapshots' totals by their differences."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._last = EngineSnapshot()
        self._counters = {
            name: Counter(f"headrace_{name}", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"headrace_{metric}", text, registry=self.registry)
            for name, (metric, text) in _GAUGES.items()
        }
        self._ready = Gauge(
            "headrace_ready", "1 while the engine serves requests, else 0.", registry=self.registry
        )
        self._finished = Counter(
            "headrace_requests_finished_total",
            "Requests that ended, by finish reason.",
            ["reason"],
            registry=self.registry,
        )
        self._ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._memory = Gauge(
            "headrace_memory_bytes",
            "Bytes that the engine has planned for and holds, by memory (host, gpu) and purpose.",
            ["memory", "purpose"],
            registry=self.registry,
        )
        self._experts = ExpertMetrics(self.registry)
        self._gap = Histogram(
            "headrace_inter_token_seconds",
            "Between the tokens of one sequence, after the first.",
            buckets=_GAP_BUCKETS,
            registry=self.registry,
        )

    def request_timer(self) -> Callable[[OutputDelta], None]:
        """Return a function that takes each delta of one request, starting its clock now."""
        arrival = time.perf_counter()
        last: dict[int, float] = {}

        def observe(delta: OutputDelta) -> None:
            if not delta.token_ids:
                return
            now = time.perf_counter()
            if not last:
                self._ttft.observe(now - arrival)
            if delta.index in last:
                gap = (now - last[delta.index]) / len(delta.token_ids)
                for _ in delta.token_ids:
                    self._gap.observe(gap)
            last[delta.index] = now

        return observe

    def render(
        self,
        snapshot: EngineSnapshot,
        state: EngineState,
        info: EngineInfo | None = None,
        *,
        stuck: bool = False,
    ) -> bytes:
        """Return the text of ``/metrics`` after taking in ``snapshot``; ``info`` once it is there.

        stuck: the engine is alive and has said nothing for too long.
        """
        for name, counter in self._counters.items():
            advance(counter, name, getattr(self._last, name), getattr(snapshot, name))
        for reason, total in snapshot.requests_finished.items():
            before = self._last.requests_finished.get(reason, 0)
            advance(self._finished.labels(reason), f"finished {reason}", before, total)
        alive = state.phase is Phase.READY
        for name, gauge in self._gauges.items():
            # A dead engine runs nothing, whatever its last message said.
            gauge.set(getattr(snapshot, name) if alive else 0)
        if info is not None:
            for memory, purposes in info.memory.items():
                for purpose, nbytes in purposes.items():
                    self._memory.labels(memory, purpose).set(nbytes if alive else 0)
        self._experts.take(snapshot.experts, alive=alive)
        self._ready.set(1 if alive and not stuck else 0)
        self._last = snapshot
        return generate_latest(self.registry)
