"""What a decoding step's experts should take, from measured rates: the split's own arithmetic, and the GPU's.

A layer plans, reads its hits on the GPU while misses are fetched and computed by the CPU, computes what was
fetched, and sums up. With ``experts.split``'s formulas for the misses,

    T = call + max(hits + fetched's wait, CPU)

where each path beside the GPU adds what it takes longer. Where such layers were tried on this machine
(``gpu_path_probe``), what they waited over what these formulas say of them scales both paths. Plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import MachineError
from headrace.engine.expert_rates import StartingRates, path_rates
from headrace.experts.split import PathRates, best_fetch_count, cpu_seconds, fetch_seconds
from headrace.explain.cost import rate_of
from headrace.explain.kernel_rates import ExpertSeconds
from headrace.machine.profile import MachineProfile

FEW = 1e-9  # of a slice: a layer that misses nothing


@dataclass(frozen=True)
class CachedExperts:
    """Experts of a loaded model that a cache of slots serves.

    placement: how misses are served (``experts.placement``); wanted: slices that a layer of one token
    looks up; resident: share of all slices that have a slot
    """

    placement: str
    layers: int
    wanted: int
    slice_nbytes: int
    format: str
    resident: float


def expert_seconds(
    experts: CachedExperts, hit_rate: float, machine: MachineProfile, late: float = 1.0
) -> ExpertSeconds:
    """Seconds of all layers of a step of one token.

    Args:
        hit_rate: of the look-ups, 0 to 1.
        late: how much longer than these rates say misses take (``lateness``).

    Raises:
        MachineError: a rate is missing.
    """
    host = machine.rates.get("experts_host")
    host_s = 0.0 if host is None else host.value
    gpu_s, fetch_s, cpu_s = _layer(experts, (1 - hit_rate) * experts.wanted, machine)
    layers = experts.layers
    return ExpertSeconds(layers * gpu_s, layers * late * fetch_s, layers * late * cpu_s, host_s)


def lateness(experts: CachedExperts, machine: MachineProfile) -> float:
    """What layers that were tried waited for their misses, over what the rates say; 1 where none were.

    It is a ratio of two measurements of one machine: of one with changed rates it would mean nothing.

    Raises:
        MachineError: a rate is missing.
    """
    if "experts_layers" not in machine.rates or "experts_missed" not in machine.rates:
        return 1.0
    layer_s = rate_of(machine, "experts_layers") / experts.layers
    missing = rate_of(machine, "experts_missed") * layer_s / experts.slice_nbytes
    gpu_s, fetch_s, cpu_s = _layer(experts, min(missing, experts.wanted), machine)
    waited = layer_s - gpu_s
    return waited / (fetch_s + cpu_s) if waited > 0 and fetch_s + cpu_s > 0 else 1.0


def _layer(
    experts: CachedExperts, missing: float, machine: MachineProfile
) -> tuple[float, float, float]:
    """Seconds of the GPU, and what PCIe and the CPU add, of a layer that misses so many slices."""
    gbps = rate_of(machine, "kernel_one_slices")
    hits_s = (experts.wanted - missing) * experts.slice_nbytes / gbps
    gpu_s = rate_of(machine, "experts_call") + hits_s
    if missing < FEW:
        return gpu_s, 0.0, 0.0
    rates = _paths(experts, machine)
    # The mean layer lies between two whole numbers of misses.
    low = int(missing)
    fetch_s = cpu_s = 0.0
    for count, share in ((low, low + 1 - missing), (low + 1, missing - low)):
        fetched = _fetched(experts.placement, count, rates)
        alone = fetched in (0, count)
        one = max(0.0, fetch_seconds(fetched, rates, alone=alone) - hits_s)
        fetch_s += share * one
        cpu = cpu_seconds(count - fetched, rates, alone=alone)
        cpu_s += share * max(0.0, cpu - hits_s - one)
    return gpu_s, fetch_s, cpu_s


def _fetched(placement: str, missing: int, rates: PathRates) -> int:
    if placement == "stream":
        return missing
    return best_fetch_count(missing, rates) if placement == "hybrid" else 0


def _paths(experts: CachedExperts, machine: MachineProfile) -> PathRates:
    rates = path_rates(StartingRates(machine.rates), experts.format, experts.slice_nbytes)
    if rates is None:
        raise MachineError(
            f"the machine {machine.name!r} has no rates of PCIe and of the CPU's experts",
            hint="measure them with `headrace bench machine`",
        )
    return rates
