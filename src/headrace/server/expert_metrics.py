"""Metrics of a mixture's experts: slots, hits, bytes by path, split, stalls, memory by kind."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace.core.status import ExpertSnapshot

log = logging.getLogger(__name__)

_COUNTERS = {
    "lookups_total": "Slices of experts that layers asked for.",
    "hits_total": "Slices that were found in GPU memory.",
    "stalls_total": "Layers that waited for the CPU after everything else was done.",
    "stall_seconds_total": "Seconds of those waits.",
    "restarts_total": "Restarts of the CPU's expert threads after one died or hung.",
}
_GAUGES = {
    "slots_total": ("slots", "Places for slices of experts in GPU memory."),
    "slots_used": ("slots_used", "Places that hold a slice."),
    "hit_rate": ("hit_ratio", "Share of look-ups found in GPU memory since the start, 0 to 1."),
}
_MEMORY = {"pinned": "pinned_nbytes", "pageable": "pageable_nbytes", "mapped": "mapped_nbytes"}


def expert_memory(snapshot: ExpertSnapshot) -> dict[str, int]:
    """Bytes of experts by kind, as ``/metrics`` and ``/health`` name them: slots (GPU), pinned, pageable,
    mapped (a file)."""
    slots = snapshot.slots_total * snapshot.slot_nbytes
    return {"slots": slots, **{kind: getattr(snapshot, f) for kind, f in _MEMORY.items()}}


class ExpertMetrics:
    """The metrics of one app; absent from its text until a snapshot has experts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._last = ExpertSnapshot()
        self._made = False

    def _make(self) -> None:
        def name(text: str) -> str:
            return f"headrace_expert_{text}"

        def gauge(metric: str, text: str, label: str | None = None) -> Gauge:
            return Gauge(name(metric), text, [label] if label else [], registry=self._registry)

        self._counters = {
            field: Counter(name(field), text, registry=self._registry)
            for field, text in _COUNTERS.items()
        }
        self._gauges = {field: gauge(metric, text) for field, (metric, text) in _GAUGES.items()}
        self._bytes = Counter(
            name("bytes_total"),
            "Bytes of slices by path: resident, fetched, computed (on the CPU), promoted, streamed.",
            ["path"],
            registry=self._registry,
        )
        self._memory = gauge(
            "memory_bytes",
            "Bytes of experts in memory: slots (GPU), pinned, pageable, mapped (a file).",
            "kind",
        )
        self._split = gauge("split", "Of so many missing slices, how many are fetched.", "missing")
        self._rates = gauge("path_bytes_per_second", "Present rate of a path.", "path")
        self._made = True

    def take(self, snapshot: ExpertSnapshot | None, *, alive: bool) -> None:
        """Take in a snapshot; the gauges of a dead engine are zero."""
        if snapshot is None:
            return
        if not self._made:
            self._make()
        for field, counter in self._counters.items():
            advance(
                counter, f"expert {field}", getattr(self._last, field), getattr(snapshot, field)
            )
        for path, total in snapshot.bytes_total.items():
            before = self._last.bytes_total.get(path, 0)
            advance(self._bytes.labels(path), f"expert bytes {path}", before, total)
        for field, gauge in self._gauges.items():
            gauge.set(getattr(snapshot, field) if alive else 0)
        for kind, nbytes in expert_memory(snapshot).items():
            self._memory.labels(kind).set(nbytes if alive else 0)
        for missing, fetched in enumerate(snapshot.split):
            self._split.labels(str(missing)).set(fetched if alive else 0)
        for path, gbps in snapshot.rates_gbps.items():
            self._rates.labels(path).set(gbps * 1e9 if alive else 0)
        self._last = snapshot


def advance(counter: Counter, name: str, before: float, after: float) -> None:
    """Let a counter follow a total; one that goes back is logged and ignored."""
    if after < before:
        log.warning("the total %s went back from %s to %s; ignored", name, before, after)
        return
    counter.inc(after - before)
