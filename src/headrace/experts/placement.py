"""Where experts are computed: ``--experts auto`` picks the fastest of four ways on this machine.

- ``gpu``: all experts in VRAM, nothing ever misses
- ``cpu``: the CPU computes every expert where it lies; the GPU keeps no experts
- ``stream``: a cache in VRAM, and every miss is fetched over PCIe
- ``hybrid``: a cache in VRAM, misses split between PCIe and the CPU

Each is priced per layer from measured rates: hybrid from overlapped ones, the others from what one
path delivers alone, so a machine that is slow only under overlap is seen. The number of misses of a
layer varies, and a layer's time is not linear in it, so its expectation is taken over a binomial
distribution of k look-ups at the predicted miss rate.

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.core.words import counted
from headrace.experts.split import GIGA, PathRates, best_fetch_count, layer_seconds

Placement = Literal["gpu", "cpu", "stream", "hybrid"]
# In the order in which equally fast ones are preferred: fewer moving parts first.
PLACEMENTS: tuple[Placement, ...] = ("gpu", "cpu", "stream", "hybrid")


# Slices fetched in a layer where the CPU takes the rest: transit slots cost memory. A token's experts are
# 12 to 24 slices; a full batch misses so many that the CPU's share is beyond this anyway.
HYBRID_MAX_FETCH = 32


def most_fetched(placement: Placement, most_missing: int) -> int:
    """Slices that a layer fetches at most, of so many that it can miss: as many transit slots it has."""
    if placement in ("cpu", "gpu"):
        return 0
    return most_missing if placement == "stream" else min(most_missing, HYBRID_MAX_FETCH)


@dataclass(frozen=True)
class ExpertLoad:
    """What one decode step asks of a layer's experts.

    ``lookups``: different experts of one layer in a step (top-k for one token).
    ``num_slices``: of one expert. ``num_slots``: experts that fit into VRAM, all layers together.
    ``hit_rate``: share of look-ups that a cache of ``num_slots`` serves (experts/hit_rate.py).
    ``gpu_gbps``: at which the GPU reads resident experts.
    """

    num_layers: int
    num_experts: int
    lookups: int
    num_slices: int
    num_slots: int
    hit_rate: float
    gpu_gbps: float

    def __post_init__(self) -> None:
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"hit rate {self.hit_rate}, expected 0 to 1", param="hit_rate")
        if self.gpu_gbps <= 0:
            raise ConfigError(
                f"gpu_gbps is {self.gpu_gbps}, expected more than 0", param="gpu_gbps"
            )

    @property
    def all_fit(self) -> bool:
        return self.num_slots >= self.num_layers * self.num_experts


@dataclass(frozen=True)
class PlacementChoice:
    """The placement, the seconds that a step spends on experts in each possible one, and why."""

    placement: Placement
    seconds: dict[Placement, float]
    reason: str


def placement_seconds(load: ExpertLoad, rates: PathRates) -> dict[Placement, float]:
    """Seconds a step on experts, for each placement that this machine can do."""
    found: dict[Placement, float] = {}
    hit_s = rates.slice_nbytes * load.num_slices / (load.gpu_gbps * GIGA)
    if load.all_fit:
        found["gpu"] = load.num_layers * load.lookups * hit_s
    if rates.can_compute:
        missing = load.lookups * load.num_slices
        found["cpu"] = load.num_layers * layer_seconds(missing, 0, rates)
    if rates.can_fetch and load.num_slots:
        found["stream"] = load.num_layers * _expected_layer_s(load, rates, hit_s, all_fetched=True)
        if rates.can_compute:
            found["hybrid"] = load.num_layers * _expected_layer_s(
                load, rates, hit_s, all_fetched=False
            )
    return found


def choose_placement(
    load: ExpertLoad, rates: PathRates, wanted: Placement | Literal["auto"] = "auto"
) -> PlacementChoice:
    """The placement to use, or the one that was asked for if this machine can do it.

    Raises:
        ConfigError: the placement asked for is not possible, or none is.
    """
    seconds = placement_seconds(load, rates)
    if wanted != "auto":
        if wanted not in seconds:
            raise ConfigError(
                f"--experts {wanted} is not possible here: {_why_not(wanted, load, rates)}",
                hint=f"possible: auto, {', '.join(seconds)}" if seconds else None,
                param="experts",
            )
        return PlacementChoice(wanted, seconds, "asked for")
    if not seconds:
        raise ConfigError(
            "no place for the experts: they do not fit into VRAM, there is no slot to fetch into, "
            "and the CPU cannot compute them",
            hint="raise --vram-budget",
            param="experts",
        )
    best = min(PLACEMENTS, key=lambda p: (seconds.get(p, float("inf")), PLACEMENTS.index(p)))
    listed = ", ".join(f"{p} {1e3 * s:.2f} ms" for p, s in seconds.items())
    return PlacementChoice(best, seconds, f"experts of one step: {listed}")


def _expected_layer_s(
    load: ExpertLoad, rates: PathRates, hit_s: float, *, all_fetched: bool
) -> float:
    """A layer's expected seconds. Hits are computed while misses travel, fetched ones afterwards."""
    expected = 0.0
    k, miss_rate = load.lookups, 1 - load.hit_rate
    for missed in range(k + 1):
        chance = comb(k, missed) * miss_rate**missed * load.hit_rate ** (k - missed)
        missing = missed * load.num_slices
        fetched = missing if all_fetched else best_fetch_count(missing, rates)
        wait_s = layer_seconds(missing, fetched, rates)
        arrived_s = fetched / load.num_slices * hit_s
        expected += chance * (max(wait_s, (k - missed) * hit_s) + arrived_s)
    return expected


def _why_not(wanted: Placement, load: ExpertLoad, rates: PathRates) -> str:
    total = load.num_layers * load.num_experts
    if wanted == "gpu":
        return f"{load.num_slots} of {counted(total, 'expert')} fit into VRAM"
    if wanted != "stream" and not rates.can_compute:
        return "the CPU's rate is 0"
    return "PCIe's rate is 0" if not rates.can_fetch else "no expert fits into VRAM"
