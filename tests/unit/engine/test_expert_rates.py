"""Rates before the first step, and ``--experts auto``."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.engine.expert_rates import (
    CPU_SHARE_OF_DRAM,
    StartingRates,
    path_rates,
)
from headrace.engine.resolve import GpuSupport
from headrace.machine.profile import Rate

from .test_resolve_gpu import GB, GIB, choose, gpt_oss, machine

# GB/s, as the H200 machine's profile has them: 18 layers at 16 GiB hold some 15% of the experts.
H200 = {
    "pcie_gather": 52.0, "pcie_gather_overlapped": 51.0,
    "cpu_experts_mxfp4": 84.0, "cpu_experts_mxfp4_overlapped": 73.0, "hbm_read": 4000.0,
}  # fmt: skip


def known(probed: bool = False, **rates: float) -> StartingRates:
    return StartingRates({n: Rate(v, "GB/s", "alone", "made up") for n, v in rates.items()}, probed)


def placed(found: StartingRates, **values):
    support = GpuSupport(None, frozenset({"mxfp4"}), found)
    made = choose(gpt_oss(18), machine(10 * GIB, ram=200 * GB), support, **values)
    return made, next(c for c in made.choices if c.name == "experts")


def test_a_profile_names_both_paths_together_and_alone():
    rates = path_rates(known(**H200), "mxfp4", 4096)
    assert rates is not None
    assert (rates.pcie_gbps, rates.pcie_alone_gbps) == (51.0, 52.0)
    assert (rates.cpu_gbps, rates.cpu_alone_gbps) == (73.0, 84.0)
    assert path_rates(known(dram_read=80.0), "mxfp4", 4096) is None
    assert path_rates(known(pcie_h2d=25.0), "mxfp4", 4096) is None


def test_a_profile_says_how_many_tokens_the_cpu_computes_in_a_read():
    def tokens(**rates: float) -> float | None:
        found = path_rates(known(**H200, **rates), "mxfp4", 4096)
        assert found is not None
        return found.tokens_of_a_read

    assert tokens() is None
    assert tokens(cpu_experts_mxfp4_of16=42.0) == 8.0  # 16 tokens in the time of two reads at 84
    assert tokens(cpu_experts_mxfp4_of16=42.0, cpu_experts_mxfp4_of16_overlapped=73.0) == 16.0
    assert tokens(cpu_experts_mxfp4_of16_overlapped=1.0) == 1.0  # noise: one token takes one read
    assert tokens(cpu_experts_q4_k_of16=42.0) is None


def test_quick_probes_leave_the_cpu_what_pcie_does_not_take_of_memory():
    rates = path_rates(known(probed=True, pcie_h2d=20.0, dram_read=80.0), "mxfp4", 4096)
    assert rates is not None
    assert rates.pcie_gbps == 20.0
    assert rates.pcie_alone_gbps is None
    assert rates.cpu_gbps == pytest.approx(CPU_SHARE_OF_DRAM * 60.0)
    assert rates.cpu_alone_gbps == pytest.approx(CPU_SHARE_OF_DRAM * 80.0)
    rates = path_rates(known(probed=True, pcie_h2d=60.0, dram_read=60.0), "mxfp4", 4096)
    assert rates is not None
    assert rates.cpu_gbps == pytest.approx(CPU_SHARE_OF_DRAM * 20.0)


def test_auto_takes_both_paths_where_they_help_each_other():
    made, choice = placed(known(**H200))
    assert (made.experts, choice.value) == ("hybrid", "hybrid")
    for said in ("are missing", "hybrid", "51.0", "73.0", "machine profile", "hits predicted"):
        assert said in choice.reason
    made, choice = placed(known(probed=True, pcie_h2d=50.0, dram_read=90.0))
    assert made.experts == "hybrid"
    assert "quick probes" in choice.reason


def test_auto_switches_where_the_paths_are_slow_only_under_overlap():
    """Alone, the link (NVLink) is the faster one: all misses go over it.

    A hybrid would do the same and is no better.
    """
    fine = {**H200, "pcie_gather": 200.0, "pcie_gather_overlapped": 190.0}
    slow = {**fine, "pcie_gather_overlapped": 5.0, "cpu_experts_mxfp4_overlapped": 7.0}
    made, _ = placed(known(**fine))
    assert made.experts == "hybrid"
    made, choice = placed(known(**slow))
    assert made.experts == choice.value == "stream"
    assert "PCIe 5.0 and CPU 7.0 GB/s together, 200.0 and 84.0 alone" in choice.reason
    made, _ = placed(known(**slow), experts="hybrid")
    assert made.experts == "hybrid", "what the user asks for is not overruled"


def test_auto_leaves_experts_to_the_cpu_where_no_slot_is_left():
    made, choice = placed(known(**H200), vram_budget_nbytes=5150 * 10**6, context=4096)
    assert made.experts == "cpu", choice.reason
    assert made.vram is not None
    assert made.vram.experts_nbytes == 0


def test_slots_can_be_fewer_than_fit():
    free, _ = placed(known(**H200))
    made, choice = placed(known(**H200), expert_slots=64)
    assert choice.value == "hybrid"
    assert free.vram is not None
    assert made.vram is not None
    assert made.vram.experts_nbytes < free.vram.experts_nbytes
    slots = next(c for c in made.choices if c.name == "expert_slots")
    assert slots.value == "64"
    assert "as configured" in slots.reason
    with pytest.raises(DoesNotFitError, match="--expert-slots is 100000"):
        placed(known(**H200), expert_slots=100000, device="cuda")
    with pytest.raises(ConfigError, match="--expert-slots"):
        placed(known(**H200), expert_slots=64, experts="cpu")
    with pytest.raises(ConfigError, match="--expert-slots"):
        choose(expert_slots=64)
