"""What the CPU experts' log of rounds and the system say about a stretch of requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Columns of native/round_log.h: of a round, then of each thread.
HEAD, POINTS = 3, 6
SEEN, QUANTISED, GATE_BEGINS, GATED, DOWN_BEGINS, DOWNED = range(POINTS)
LATE_NS = 50_000
TASKS = Path("/proc/self/task")


def threads_now() -> dict[int, dict[str, Any]]:
    """Of every thread of this process: name, CPU, nanoseconds run and waited for a CPU, times it lost one."""
    found: dict[int, dict[str, Any]] = {}
    for task in TASKS.iterdir():
        try:
            stat = (task / "stat").read_text()
            run, wait, _ = (task / "schedstat").read_text().split()
            status = (task / "status").read_text()
        except OSError:  # it has ended
            continue
        name, _, rest = stat.partition("(")[2].rpartition(")")
        lost = status.partition("nonvoluntary_ctxt_switches:")[2].split()[0]
        found[int(task.name)] = {
            "name": name or stat, "cpu": int(rest.split()[36]), "run": int(run), "wait": int(wait),
            "lost": int(lost),
        }  # fmt: skip
    return found


def steal_now() -> dict[str, int]:
    """Ticks that the hypervisor gave to others, by CPU."""
    lines = Path("/proc/stat").read_text().splitlines()
    rows = [line.split() for line in lines if line.startswith("cpu")]
    return {row[0]: int(row[8]) for row in rows}


class Watch:
    """What the system did to this process's threads between begin and end: ``found``."""

    def __enter__(self) -> Watch:
        self._threads, self._steal = threads_now(), steal_now()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begin
        now, steal = threads_now(), steal_now()
        rows: list[tuple[int, str]] = []
        for tid, after in now.items():
            before = self._threads.get(tid, {"run": 0, "wait": 0, "lost": 0})
            ran, waited, lost = (after[k] - before[k] for k in ("run", "wait", "lost"))
            if ran / 1e9 > 0.01 * seconds or waited > 1e5:
                text = f"{after['name']}@{after['cpu']} ran {ran / 1e6:.0f} waited {waited / 1e6:.1f} ms"
                rows.append((waited, f"{text}, lost {lost}"))
        rows.sort(key=lambda row: -row[0])
        workers = [text for _, text in rows if text.startswith("experts-")]
        others = [text for _, text in rows if not text.startswith("experts-")]
        stolen = {k: n - self._steal[k] for k, n in steal.items() if n != self._steal[k]}
        self.found: dict[str, Any] = {
            "seconds": round(seconds, 3), "workers": workers[:5], "others": others[:8], "steal_ticks": stolen,
        }  # fmt: skip


def spread(nanoseconds: Any) -> list[float]:
    """Microseconds [10th, 50th, 90th percentile, maximum]."""
    at = (*np.percentile(nanoseconds, [10, 50, 90]), nanoseconds.max())
    return [round(float(v) / 1e3, 1) for v in at]


def rounds_of(log: torch.Tensor, cpus: tuple[int, ...], skip: int = 8) -> dict[str, Any]:
    """What the log says, microseconds since the leader saw the request as ``spread`` has them.

    cpus: names of the threads. late_*: rounds in which a thread was ``LATE_NS`` behind the median, and whose.
    """
    a = log.numpy().copy()
    a = a[(a[:, 1] > 0) & (a[:, 2] > a[:, 1])]
    a = a[np.argsort(a[:, 1])][skip:]
    if not len(a):
        return {"rounds": 0}
    nbytes, began, ended = a[:, 0], a[:, 1], a[:, 2]
    t = a[:, HEAD:].reshape(len(a), len(cpus), POINTS) - began[:, None, None]
    busy = ended - began
    gate = t[:, :, GATED] - t[:, :, GATE_BEGINS]
    result: dict[str, Any] = {
        "rounds": len(a),
        "gbps": round(float(nbytes.sum() / busy.sum()), 2),
        "gbps_of_median": round(float(np.median(nbytes / busy)), 2),
        "mb": round(float(nbytes.mean()) / 1e6, 2),
        "busy": spread(busy),
        "pause": spread(began[1:] - ended[:-1]),
    }
    for name, at in (
        ("seen", SEEN),
        ("quantised", QUANTISED),
        ("gated", GATED),
        ("downed", DOWNED),
    ):
        first, last = t[:, :, at].min(1), t[:, :, at].max(1)
        result |= {f"{name}_first": spread(first), f"{name}_last": spread(last)}
        over = t[:, :, at] - np.median(t[:, :, at], 1, keepdims=True) > LATE_NS
        who = {str(cpus[w]): int(n) for w, n in enumerate(over.sum(0)) if n}
        result[f"late_{name}"] = {"rounds": int(over.any(1).sum()), "by_cpu": who}
    result |= {"gate_slowest": spread(gate.max(1)), "gate_fastest": spread(gate.min(1))}
    result["gate_mean_by_thread"] = [round(float(v) / 1e3) for v in gate.mean(0)]
    return result
