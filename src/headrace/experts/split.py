"""How many missing slices of a layer to fetch, so that PCIe and the CPU finish together.

A layer misses m slices. q of them go over PCIe into slots and are computed on the GPU, the other
m - q are computed by the CPU where they lie. With slices of s bytes the layer waits for

    T(q) = max(fetch_latency + q * s / B_P,  cpu_latency + (m - q) * s / B_C)

where a path without work costs nothing. B_P and B_C are measured with both paths busy; at q = 0 and
q = m one path runs alone, at its own rate if that is known. Without latencies the two meet at
q* = m * B_P / (B_P + B_C); since T is not linear in whole slices the best q is chosen for each m, and
no remainder is carried to the next layer (measured, 2026-11-29, H200 machine, 18 layers of three
misses: q = 1 everywhere 6.86 ms a token, carrying q = 1.20 on average 7.15 ms, 1.50 9.28 ms).

Among equally fast q the largest wins: what was fetched is warm next time.

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.core.errors import ConfigError

GIGA = 1e9
# What a fetch and a request cost beside their bytes (H200 machine, 2026-11-29: the fetched slices are
# computed after the last of them has arrived; a round trip through flags takes 4 us).
FETCH_LATENCY_S = 20e-6
CPU_LATENCY_S = 8e-6
# Two times are the same below this relative difference: nothing is measured to a part in 10^9, and
# rounding must not decide a tie.
SAME = 1e-9


@dataclass(frozen=True)
class PathRates:
    """What the two ways to serve a miss deliver, in GB/s (10^9 bytes a second) and seconds.

    ``pcie_gbps`` and ``cpu_gbps`` are overlapped rates. The ``_alone`` rates say what a path does
    while the other one rests; None if it makes no difference. A rate of 0 is a path that is not
    there: then the other one serves everything. ``tokens_of_a_read``: tokens of one expert that the CPU
    computes in the time of one read of its weights, None if not measured.
    """

    pcie_gbps: float
    cpu_gbps: float
    slice_nbytes: int
    fetch_latency_s: float = 0.0
    cpu_latency_s: float = 0.0
    pcie_alone_gbps: float | None = None
    cpu_alone_gbps: float | None = None
    tokens_of_a_read: float | None = None

    def __post_init__(self) -> None:
        found = {
            "pcie_gbps": self.pcie_gbps,
            "cpu_gbps": self.cpu_gbps,
            "fetch_latency_s": self.fetch_latency_s,
            "cpu_latency_s": self.cpu_latency_s,
            "pcie_alone_gbps": self.pcie_alone_gbps,
            "cpu_alone_gbps": self.cpu_alone_gbps,
        }
        for name, value in found.items():
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(
                    f"path rates: {name} is {value}, expected a number from 0 up",
                    hint="run `headrace bench machine` again",
                    param=name,
                )
        if self.slice_nbytes < 1:
            raise ConfigError(
                f"path rates: slice_nbytes is {self.slice_nbytes}, expected at least 1",
                param="slice_nbytes",
            )
        if not (self.can_fetch or self.can_compute):
            raise ConfigError(
                "path rates: neither PCIe nor the CPU can serve a missing expert (both rates are 0)",
                hint="run `headrace bench machine` again, or hold all experts on the GPU",
                param="pcie_gbps",
            )

    @property
    def can_fetch(self) -> bool:
        return self.pcie_gbps > 0 or bool(self.pcie_alone_gbps)

    @property
    def can_compute(self) -> bool:
        return self.cpu_gbps > 0 or bool(self.cpu_alone_gbps)

    def scaled(self, pcie: float = 1.0, cpu: float = 1.0) -> PathRates:
        """The same paths with every rate of PCIe and of the CPU multiplied by these factors."""
        p, c = self.pcie_alone_gbps, self.cpu_alone_gbps
        return replace(
            self,
            pcie_gbps=self.pcie_gbps * pcie,
            cpu_gbps=self.cpu_gbps * cpu,
            pcie_alone_gbps=None if p is None else p * pcie,
            cpu_alone_gbps=None if c is None else c * cpu,
        )


def fetch_seconds(slices: int, rates: PathRates, *, alone: bool = False) -> float:
    """Seconds until so many slices have arrived; infinite if PCIe cannot be used."""
    if slices == 0:
        return 0.0
    gbps = _rate(rates.pcie_gbps, rates.pcie_alone_gbps, alone)
    if gbps <= 0:
        return float("inf")
    return rates.fetch_latency_s + slices * rates.slice_nbytes / (gbps * GIGA)


def cpu_seconds(slices: int, rates: PathRates, *, alone: bool = False) -> float:
    """Seconds until the CPU has computed so many slices; infinite if it cannot be used."""
    if slices == 0:
        return 0.0
    gbps = _rate(rates.cpu_gbps, rates.cpu_alone_gbps, alone)
    if gbps <= 0:
        return float("inf")
    return rates.cpu_latency_s + slices * rates.slice_nbytes / (gbps * GIGA)


def layer_seconds(missing: int, fetched: int, rates: PathRates) -> float:
    """T(q): seconds that a layer waits for ``missing`` slices of which ``fetched`` are fetched."""
    if not 0 <= fetched <= missing:
        raise ValueError(f"{fetched} of {missing} slices cannot be fetched")
    alone = fetched in (0, missing)
    fetch = fetch_seconds(fetched, rates, alone=alone)
    return max(fetch, cpu_seconds(missing - fetched, rates, alone=alone))


def best_fetch_count(missing: int, rates: PathRates) -> int:
    """q: the slices of ``missing`` to fetch, the rest is the CPU's. 0 <= q <= missing.

    The paths' times rise and fall with q, so the best inner q is next to where they cross; the two
    ends have rates of their own and are tried as well.
    """
    if missing <= 0:
        return 0
    candidates = {0, missing}
    if rates.pcie_gbps > 0 and rates.cpu_gbps > 0:
        lead_s = rates.cpu_latency_s - rates.fetch_latency_s
        together = rates.pcie_gbps + rates.cpu_gbps
        lead_slices = lead_s * rates.pcie_gbps * rates.cpu_gbps * GIGA / rates.slice_nbytes
        crossing = (missing * rates.pcie_gbps + lead_slices) / together
        at = int(min(max(crossing, 0.0), float(missing)))
        candidates |= {q for q in (at - 1, at, at + 1, at + 2) if 0 <= q <= missing}
    best, best_s = 0, float("inf")
    for q in sorted(candidates):
        seconds = layer_seconds(missing, q, rates)
        if seconds <= best_s * (1 + SAME):
            best, best_s = q, min(seconds, best_s)
    return best


def split_table(max_missing: int, rates: PathRates) -> tuple[int, ...]:
    """Entry m: the slices to fetch of m missing ones, for m from 0 to ``max_missing``."""
    return tuple(best_fetch_count(m, rates) for m in range(max_missing + 1))


def _rate(overlapped: float, by_itself: float | None, alone: bool) -> float:
    return by_itself if alone and by_itself is not None else overlapped
