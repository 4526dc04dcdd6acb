"""Measures a machine profile: what memory, link, CPU and GPU give, alone and beside each other.

What is run comes from above (``HostLoads``, ``GpuSide``), so that the order of the measurements and
what follows from them can be tested without the hardware. About 20 to 40 seconds on a large machine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Literal, Protocol

import torch

from headrace.core.words import counted
from headrace.machine.disturbance import DISTURBED_SHARE, Watch
from headrace.machine.probe import Machine
from headrace.machine.profile import (
    OVERLAPPED,
    GpuProfile,
    HostProfile,
    LinkProfile,
    MachineProfile,
    Rate,
)
from headrace.machine.threads import SAME_RATE, best_threads, choose_threads, thread_candidates

Load = Callable[[int, Sequence[int], float], float]  # threads, CPUs, seconds -> GB/s
Progress = Callable[[str, float], None]

# The format by which the number of threads is chosen: the one of the models that need two paths most.
THREADS_FORMAT = "mxfp4"
LINK_KINDS = ("h2d", "d2h", "gather")
GPU_DTYPES = ("bf16", "f16", "fp8", "f32")
CPU_DTYPES = ("f32", "bf16")
_CPU_PRODUCT = 2048
# Turns of the counts of threads, of which the profile keeps the best: as long as three points together.
ROUNDS = 5
# Spent on measuring again what others disturbed: as much as a large machine's whole measurement.
AGAIN_S = 40.0


class LinkLoad(Protocol):
    """Traffic over the link; see ``machine.gpu_rates.Link``."""

    def rate(self, kind: str, busy: Callable[[], bool]) -> float: ...
    def rate_alone(self, kind: str, seconds: float) -> float: ...


class GpuSide(Protocol):
    """What is measured with a GPU; see ``machine.gpu_rates.CudaSide``."""

    profile: GpuProfile

    @property
    def link(self) -> LinkLoad: ...

    def hbm_read_gbps(self) -> float: ...
    def product_gflops(self, dtype: str) -> float | None: ...
    def launch_times(self) -> dict[str, float]: ...
    def flag_round_trip_s(self) -> float | None: ...


@dataclass(frozen=True)
class HostLoads:
    """What the CPU is measured with. ``experts``: format -> opens its load (which takes memory)."""

    read: Load
    experts: Mapping[str, Callable[[], AbstractContextManager[Load]]]


@dataclass
class Measurement:
    """One measuring of a machine.

    ``seconds``: of each point of a curve; points that decide something take twice as long. ``again_s``: for
    measuring once more what was measured while other programs were busy (``watch`` sees them).
    """

    machine: Machine
    loads: HostLoads
    gpu: GpuSide | None = None
    link: LinkProfile | None = None
    progress: Progress | None = None
    seconds: float = 0.25
    watch: Watch = field(default_factory=Watch)
    again_s: float = AGAIN_S
    rates: dict[str, Rate] = field(default_factory=dict[str, Rate])
    best: int = 1
    disturbed: dict[str, float] = field(default_factory=dict[str, float])

    def run(self) -> MachineProfile:
        """Measure everything."""
        start = datetime.now(UTC)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("reading memory", self._curve),
            ("choosing threads", self._threads),
            ("CPU experts", self._experts),
            ("CPU products", self._cpu_products),
        ]
        if self.gpu is not None:
            gpu = self.gpu
            steps += [
                ("PCIe", lambda: self._link(gpu)),
                ("GPU memory and products", lambda: self._gpu(gpu)),
                ("launches and flags", lambda: self._launches(gpu)),
            ]
        for number, (label, step) in enumerate(steps):
            if self.progress is not None:
                self.progress(label, number / len(steps))
            self._group(label, step)
        if self.progress is not None:
            self.progress("done", 1.0)
        cpu, memory = self.machine.cpu, self.machine.memory
        gpu_name = "" if self.gpu is None else f"{self.gpu.profile.name}, "
        return MachineProfile(
            name=f"{gpu_name}{cpu.model}",
            origin="measured",
            host=HostProfile(
                cpu.model, cpu.num_cores, memory.usable_total_nbytes, cpu.isa, cpu.num_numa_nodes
            ),
            gpu=None if self.gpu is None else self.gpu.profile,
            link=None if self.gpu is None else self.link or LinkProfile("unknown link"),
            rates=self.rates,
            best_threads=self.best,
            measured_at=start.isoformat(timespec="seconds"),
            disturbed=self.disturbed,
        )

    def _group(self, label: str, step: Callable[[], None]) -> None:
        """Measure a group; once more, if others were busy meanwhile and there is time for as much again.

        What was disturbed less is kept. At once, since later groups run with the threads that an earlier
        one has chosen.
        """
        rates, best, start = dict(self.rates), self.best, time.perf_counter()
        share = self.watch.during(step)
        took = time.perf_counter() - start
        if share > DISTURBED_SHARE and took <= self.again_s:
            self.again_s -= took
            first = self.rates, self.best
            self.rates, self.best = rates, best
            self.watch.wait()
            again = self.watch.during(step)
            if again >= share:
                self.rates, self.best = first
            share = min(share, again)
        if share > DISTURBED_SHARE:
            self.disturbed[label] = round(share, 2)

    def _add(
        self,
        name: str,
        value: float | None,
        how: str,
        unit: Literal["GB/s", "GFLOP/s", "s"] = "GB/s",
    ) -> None:
        """Keep a rate; what could not be measured is left out."""
        if value is not None and math.isfinite(value) and value > 0:
            mode = "overlapped" if name.endswith(OVERLAPPED) else "alone"
            date = datetime.now(UTC).date().isoformat()
            self.rates[name] = Rate(float(f"{value:.4g}"), unit, mode, f"{how}, {date}")

    def _cpus(self, threads: int) -> Sequence[int]:
        return choose_threads(self.machine.cpu, threads).cpus

    def _load(self, load: Load, threads: int) -> float:
        """GB/s of a load, for a point that decides something."""
        return load(threads, self._cpus(threads), 2 * self.seconds)

    def _beside(self, kind: str, load: Callable[[], float]) -> tuple[float, float]:
        """GB/s of a host load and of link traffic at the same time."""
        assert self.gpu is not None
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(load()))
        thread.start()
        link = self.gpu.link.rate(kind, thread.is_alive)
        thread.join()
        return (found[0] if found else 0.0), link

    def _curve(self) -> None:
        candidates = thread_candidates(self.machine.cpu, beside_gpu=self.gpu is not None)
        most = max(candidates)
        doubling = {2**i for i in range(most.bit_length()) if 2**i <= most}
        if self.gpu is not None:
            self.gpu.link.rate_alone("gather", self.seconds / 10)  # compiled before it is timed
        for n in sorted({*candidates, *doubling}):
            cpus = self._cpus(n)
            how = f"read loop, {counted(n, 'thread')}"
            self._add(f"dram_read_t{n}", self.loads.read(n, cpus, self.seconds), how)
            if self.gpu is not None:
                host, _ = self._beside(
                    "gather", lambda n=n, cpus=cpus: self.loads.read(n, cpus, self.seconds)
                )
                self._add(f"dram_read_t{n}{OVERLAPPED}", host, f"{how}, beside a PCIe gather")

    def _threads(self) -> None:
        """Time the candidates and take the best; the read loop stands in where there is no kernel."""
        candidates = thread_candidates(self.machine.cpu, beside_gpu=self.gpu is not None)
        if THREADS_FORMAT in self.loads.experts:
            with self.loads.experts[THREADS_FORMAT]() as load:
                name = f"cpu_experts_{THREADS_FORMAT}"
                self._choose(candidates, name, load)
        else:
            self._choose(candidates, "dram_read", self.loads.read)
        for suffix in ("", OVERLAPPED):  # the curve has the best count among its points
            rate = self.rates.get(f"dram_read_t{self.best}{suffix}")
            if rate is not None:
                self.rates[f"dram_read{suffix}"] = rate

    def _choose(self, candidates: Sequence[int], name: str, load: Load) -> None:
        """The topology's count, or one that is clearly better: without a GPU alone, with one in the sum of
        both paths. All counts take turns, ``ROUNDS`` times, and medians are kept."""
        alone: dict[int, list[float]] = {n: [] for n in candidates}
        beside: dict[int, list[float]] = {n: [] for n in candidates}
        together: dict[int, list[float]] = {n: [] for n in candidates}
        seconds = 3 * self.seconds / ROUNDS
        for _ in range(ROUNDS):
            for n in candidates:
                alone[n].append(load(n, self._cpus(n), seconds))
                if self.gpu is None:
                    together[n].append(alone[n][-1])
                    continue
                host, link = self._beside("gather", lambda n=n: load(n, self._cpus(n), seconds))
                beside[n].append(host)
                together[n].append(host + link)
        for n in candidates:
            how = f"{counted(n, 'thread')}, median of {ROUNDS}"
            self._add(f"{name}_t{n}", median(alone[n]), how)
            if beside[n]:
                how += ", beside a PCIe gather"
                self._add(f"{name}_t{n}{OVERLAPPED}", median(beside[n]), how)
        self.best = self._best_of(together)
        for suffix in ("", OVERLAPPED):
            rate = self.rates.get(f"{name}_t{self.best}{suffix}")
            if rate is not None:
                self.rates[f"{name}{suffix}"] = rate

    def _best_of(self, together: Mapping[int, Sequence[float]]) -> int:
        """The best count. Without a GPU fewer threads than the topology's must keep the arithmetic, too:
        one thread can read as much as all of them, and prompts are computed by all of them."""
        start = choose_threads(self.machine.cpu, reserve=0 if self.gpu is None else 1).threads
        found = best_threads(together, start)
        if self.gpu is not None or found >= start:
            return found
        few, many = (_cpu_gflops("f32", self.seconds, n) for n in (found, start))
        return found if few >= many * (1 - SAME_RATE) else start

    def _experts(self) -> None:
        for fmt, opened in self.loads.experts.items():
            name, how = f"cpu_experts_{fmt}", f"experts in {fmt}, {counted(self.best, 'thread')}"
            if name in self.rates:
                continue
            with opened() as load:
                self._add(name, self._load(load, self.best), how)
                if self.gpu is not None:
                    host, _ = self._beside("gather", lambda load=load: self._load(load, self.best))
                    self._add(f"{name}{OVERLAPPED}", host, f"{how}, beside a PCIe gather")

    def _cpu_products(self) -> None:
        for dtype in CPU_DTYPES:
            how = f"torch.mm of {_CPU_PRODUCT} x {_CPU_PRODUCT}, {counted(self.best, 'thread')}"
            gflops = _cpu_gflops(dtype, self.seconds, self.best)
            self._add(f"cpu_flops_{dtype}", gflops, how, "GFLOP/s")

    def _link(self, gpu: GpuSide) -> None:
        names = {"h2d": "copy engine", "d2h": "copy engine", "gather": "kernel of 24 programs"}
        read = f"beside a read loop of {counted(self.best, 'thread')}"
        for kind in LINK_KINDS:
            how = f"{names[kind]}, pinned memory in pieces of 64 MiB"
            self._add(f"pcie_{kind}", gpu.link.rate_alone(kind, 2 * self.seconds), how)
            _, link = self._beside(kind, lambda: self._load(self.loads.read, self.best))
            self._add(f"pcie_{kind}{OVERLAPPED}", link, f"{how}, {read}")

    def _gpu(self, gpu: GpuSide) -> None:
        self._add("hbm_read", gpu.hbm_read_gbps(), "kernel that only reads 4 GiB")
        for dtype in GPU_DTYPES:
            self._add(f"gpu_flops_{dtype}", gpu.product_gflops(dtype), "square product", "GFLOP/s")

    def _launches(self, gpu: GpuSide) -> None:
        for name, value in gpu.launch_times().items():
            kernels = (
                "reads of 1 and 4 MiB, bytes taken off" if name == "graph_read" else "the smallest"
            )
            self._add(name, value, f"1,000 kernels: {kernels}", "s")
        self._add("flag_round_trip", gpu.flag_round_trip_s(), "2,000 flags in pinned memory", "s")


def _cpu_gflops(dtype: str, seconds: float, threads: int) -> float:
    n, kind = _CPU_PRODUCT, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, y = torch.randn(n, n).to(kind), torch.randn(n, n).to(kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best, end, runs = float("inf"), time.perf_counter() + seconds, 0
        while runs < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(x, y)
            best = min(best, time.perf_counter() - start)
            runs += 1
    finally:
        torch.set_num_threads(before)
    return 2 * n**3 / best / 1e9
