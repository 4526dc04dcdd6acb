"""What is known of the two paths before the first step, and the placement that follows from it.

Plain Python: rates by name in, records out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.model_spec import ModelSpec
from headrace.experts.hit_rate import predict_hit_rate
from headrace.experts.placement import ExpertLoad, PlacementChoice, choose_placement
from headrace.experts.prefill import MANY, MANY_TOKENS
from headrace.experts.slab import SlabLayout
from headrace.experts.split import CPU_LATENCY_S, FETCH_LATENCY_S, PathRates
from headrace.machine.profile import OVERLAPPED, Rate

# Without a rate of the expert kernels: their share of what the memory reads. The kernels themselves
# read at nearly a plain loop's rate; the rest is for what PCIe takes of the same memory.
CPU_SHARE_OF_DRAM = 0.75
# Beside PCIe the memory still gives a third of its rate to the CPU, however fast the link is.
LEAST_DRAM_SHARE = 1 / 3
# Tokens of the largest captured step; longer inputs are prompts.
STEP_TOKENS = 16
# Where the GPU memory's rate is not known. It matters little: 300 GB/s is a small GPU's, several times
# any link's, and what is compared with it are links and host memory.
GPU_GBPS = 300.0


@dataclass(frozen=True)
class StartingRates:
    """A machine's rates by name (``machine.profile``); ``probed``: in a hurry, when the engine started."""

    rates: Mapping[str, Rate]
    probed: bool = False

    @property
    def source(self) -> str:
        """Where they are from, for people."""
        return "quick probes" if self.probed else "the machine profile"

    def first(self, *names: str) -> float | None:
        """The first of these rates that is there."""
        return next((self.rates[name].value for name in names if name in self.rates), None)


def path_rates(known: StartingRates, fmt: str, slice_nbytes: int) -> PathRates | None:
    """Both paths together and, where it was measured, alone; None without a rate of PCIe or of the CPU.

    fmt: of the slabs, which names the CPU's kernel.
    """
    first, experts = known.first, f"cpu_experts_{fmt}"
    pcie_alone = first("pcie_gather", "pcie_h2d")
    pcie = first("pcie_gather_overlapped", "pcie_h2d_overlapped") or pcie_alone
    cpu_alone = first(experts)
    cpu = first(experts + "_overlapped") or cpu_alone
    if pcie is None:
        return None
    if cpu is None:
        dram_alone = first("dram_read", "dram_read_overlapped")
        if dram_alone is None:
            return None
        beside = first("dram_read_overlapped")
        beside = max(dram_alone - pcie, LEAST_DRAM_SHARE * dram_alone) if beside is None else beside
        cpu_alone, cpu = CPU_SHARE_OF_DRAM * dram_alone, CPU_SHARE_OF_DRAM * beside
    return PathRates(
        pcie_gbps=pcie,
        cpu_gbps=cpu,
        slice_nbytes=slice_nbytes,
        fetch_latency_s=FETCH_LATENCY_S,
        cpu_latency_s=CPU_LATENCY_S,
        pcie_alone_gbps=pcie_alone if pcie_alone != pcie else None,
        cpu_alone_gbps=cpu_alone if cpu_alone != cpu else None,
        tokens_of_a_read=_tokens_of_a_read(known, experts),
    )


def _tokens_of_a_read(known: StartingRates, experts: str) -> float | None:
    """From the rates of one token and of many, of the same circumstances."""
    for suffix in (OVERLAPPED, ""):
        one, many = known.first(experts + suffix), known.first(experts + MANY + suffix)
        if one and many:
            return max(1.0, MANY_TOKENS * many / one)
    return None


def automatic_placement(
    spec: ModelSpec, layout: SlabLayout, slots_nbytes: int, known: StartingRates
) -> PlacementChoice | None:
    """The fastest way to compute experts that do not all fit; None where no rates are known.

    Args:
        slots_nbytes: of GPU memory, what slots may take.

    Raises:
        ConfigError: no way is possible.
    """
    moe, rates = spec.moe, path_rates(known, layout.format, layout.slice_nbytes)
    if moe is None or rates is None:
        return None
    mixtures = sum(layer.moe for layer in spec.layers)
    slots = max(slots_nbytes, 0) // layout.slab_nbytes
    residency = min(slots / (mixtures * moe.num_experts), 1.0)
    load = ExpertLoad(
        num_layers=mixtures,
        num_experts=moe.num_experts,
        lookups=moe.num_experts_per_token,
        num_slices=layout.num_slices,
        num_slots=min(slots, mixtures * moe.num_experts - 1),
        hit_rate=predict_hit_rate(moe.num_experts, moe.num_experts_per_token, residency),
        gpu_gbps=known.first("hbm_read") or GPU_GBPS,
    )
    choice = choose_placement(load, rates)
    numbers = (
        f"{choice.reason}, at PCIe {rates.pcie_gbps:.1f} and CPU {rates.cpu_gbps:.1f} GB/s together, "
        f"{rates.pcie_alone_gbps or rates.pcie_gbps:.1f} and "
        f"{rates.cpu_alone_gbps or rates.cpu_gbps:.1f} alone ({known.source}), {residency:.0%} resident "
        f"and {load.hit_rate:.0%} hits predicted"
    )
    return PlacementChoice(choice.placement, choice.seconds, numbers)
