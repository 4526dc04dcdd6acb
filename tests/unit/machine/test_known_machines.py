"""The catalogue of machines: every record complete, parts combined, mistakes named."""

from __future__ import annotations

import re

import pytest

from headrace.core.errors import ConfigError
from headrace.machine.known import known_machine, memory_nbytes, parts
from headrace.machine.profile import MachineProfile

# What people ask about, each under a plain name.
WANTED = """rtx-3090 rtx-4060-laptop rtx-4090 rtx-5070-ti rtx-5090 rtx-pro-6000 a100 h100 h200 b200 gb300
mi300x mi355x tpu-v5e tpu-v6e trainium2 gaudi-3 groq-lpu wse-3 rubin-r200 rubin-cpx apple-m4-max
ddr5-6000-dual ddr5-6400-8ch ddr5-4800-12ch pcie4x16""".split()


@pytest.mark.parametrize("name", WANTED)
def test_everything_asked_for_is_there_with_sources(name):
    part = parts()[name]
    assert part.rates
    for value, source in part.rates.values():
        assert value > 0
        assert len(source) > 7


@pytest.mark.parametrize("name", [n for n, p in parts().items() if p.kind != "link"])
def test_every_chip_and_host_is_a_whole_machine(name):
    machine = known_machine(name)
    assert {"dram_read", "cpu_flops_f32", "disk_read"} <= set(machine.rates)
    if machine.gpu is not None:
        assert {"hbm_read", "pcie_h2d", "gpu_flops_bf16", "gpu_flops_f32"} <= set(machine.rates)
        assert machine.gpu.multiprocessors > 0
    assert MachineProfile.from_json(machine.to_json()) == machine


def test_parts_combine():
    machine = known_machine("RTX-4090+pcie4x8+ddr5-6000-dual+ram=192GiB")
    assert machine.gpu is not None
    assert machine.gpu.memory_nbytes == 24 * 2**30
    assert machine.host.memory_nbytes == 192 * 2**30
    assert machine.rates["pcie_h2d"].value == pytest.approx(8 * 16 * 128 / 130 / 8, rel=1e-3)
    assert machine.rates["dram_read"].value == 2 * 8 * 6.0
    assert known_machine("ddr5-6400-8ch").gpu is None


def test_h200_by_its_data_sheet():
    rates = known_machine("h200").rates
    assert rates["hbm_read"].value == 4800
    assert rates["gpu_flops_bf16"].value == 989e3
    assert rates["gpu_flops_bf16"].unit == "GFLOP/s"


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("h200", 150_109_880_320),  # CUDA's total on the H200 machine
        ("h100", 85_520_809_984),  # nvidia-smi's
        ("mi300x", 206_141_652_992),  # rocm-smi's
        ("a100", 80 * 2**30),
    ],
)
def test_gpu_memory_is_what_drivers_report(name, nbytes):
    """Vendors' GB of HBM are 2^30 bytes, a few held back: an H200 of "141 GB" has 150 x 10^9."""
    gpu = known_machine(name).gpu
    assert gpu is not None
    assert abs(gpu.memory_nbytes - nbytes) < 2**20


def test_rubin_has_its_own_host():
    """Vera: 88 cores, 1.2 TB/s; NVLink-C2C of 1.8 TB/s both ways. Grace was Blackwell's."""
    rates = known_machine("rubin-r200").rates
    assert rates["dram_read"].value == 1200
    assert rates["pcie_h2d"].value == 900


def test_memory_rates_are_wires_times_clock():
    """Bits of the bus x Gbit/s a pin / 8."""
    for name, bits, gbit in (
        ("rtx-3090", 384, 19.5),
        ("rtx-4090", 384, 21),
        ("rtx-5070-ti", 256, 28),
        ("rtx-5090", 512, 28),
        ("rtx-pro-6000", 512, 28),
        ("rtx-4060-laptop", 128, 16),
        ("b200", 7680, 2 * 3.996),
        ("apple-m4-max", 512, 8.533),
    ):
        assert known_machine(name).rates["hbm_read"].value == pytest.approx(
            bits * gbit / 8, rel=1e-3
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx-5070ti", "did you mean rtx-5070-ti"),
        ("rtx-4090+h200", "both a GPU"),
        ("pcie4x16", "neither a GPU nor a host"),
        ("rtx-4090+ram=lots", "not a size"),
    ],
)
def test_mistakes_are_named(name, message):
    with pytest.raises(ConfigError, match=message):
        known_machine(name)


def test_sizes():
    assert memory_nbytes("1.5GiB") == 1610612736
    assert memory_nbytes("230MB") == 230_000_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx-4090+ram=0GiB", "no memory"),
        ("rtx-4090+ram=64GiB+ram=32GiB", "twice"),
        ("apple-m4-max+ddr5-6000-dual", "shares the memory of 'apple-m4-max-memory'"),
        ("apple-m4-max+pcie4x16", "shares the memory"),
        ("rtx-4090+unified", "a memory of its own"),
    ],
)
def test_parts_that_cannot_be_are_refused(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        known_machine(name)
    assert caught.value.hint


def test_a_shared_memory_has_one_size():
    machine = known_machine("apple-m4-max+ram=36GiB")
    assert machine.name == "apple-m4-max+ram=36GiB"
    assert machine.gpu is not None
    assert machine.gpu.memory_nbytes == machine.host.memory_nbytes == 36 * 2**30
    assert known_machine("apple-m4-max+apple-m4-max-memory+unified").gpu is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx-4090+vram=24GiB", "vram= is no property of a machine: only ram="),
        ("rtx-4090+DRAM=64GiB", "DRAM= is no property"),
        ("rtx-4090,pcie4x16", "'rtx-4090,pcie4x16' .* parts are joined by \\+"),
        ("rtx-4090 pcie4x16", "parts are joined by \\+"),
        ("rtx-4090+", "a part is missing"),
        ("", "a part is missing"),
        ("this+ram=64GiB", "'this' stands alone"),
        ("rtx-4090+rtx-5090", "are both a GPU"),
        ("pcie4x16", "neither a GPU nor a host"),
        ("rtx-5070ti", "did you mean rtx-5070-ti"),
    ],
)
def test_a_mistyped_machine_is_told_how_machines_are_put_together(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        known_machine(name)
    hint = caught.value.hint or ""
    assert "GPU+LINK+HOST+ram=SIZE" in hint
    example = re.search(r"rtx\S+\+ram=\w+", hint)
    assert example is not None
    assert (
        known_machine(example[0]).host.memory_nbytes == 192 * 2**30
    )  # what the hint shows is right


def test_every_property_has_its_source() -> None:
    """Memory, multiprocessors and cores too, not the rates alone; a link has neither."""
    for part in parts().values():
        assert all(source for _, source in part.rates.values()), part.name
        assert bool(part.specs) == (part.kind != "link"), part.name
