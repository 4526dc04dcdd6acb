"""This machine as a profile: what the probe knows, the catalogue's rates of its GPU, one quick read.

A rate that nobody measured is the catalogue's peak of the same chip, and says so in its source.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime

from headrace.cli.reporting import note
from headrace.machine.known import DISK_GBPS, THREAD_WAKE_S, Part, known_machine, parts
from headrace.machine.probe import Machine, probe_machine
from headrace.machine.profile import GpuProfile, HostProfile, LinkProfile, MachineProfile, Rate
from headrace.machine.profile_store import find_profile, machine_key, profiles_folder

PASSES = 5  # of 192 MiB, the fastest counts: one of two is too often beside another program's
# Float32 operations a cycle and core: two 256-bit multiply-add units. Estimate for what is not Apple.
FLOPS_A_CYCLE, CLOCK_HZ = 32, 3e9


def this_machine() -> MachineProfile:
    """The profile that `headrace bench machine` stored, or a probe and one quick read (0.1 s)."""
    machine = probe_machine(gpus=True)
    gpu = machine.gpus[0].name if machine.gpus else None
    key, folder = machine_key(machine.cpu, gpu), profiles_folder()
    stored, about = find_profile(key, folder)
    if stored is not None:
        return complete(stored)
    if (folder / key.file_name).exists():
        note(f"the stored profile is not used: {about}")
    from headrace.machine.dram_probe import dram_read_gbps  # NumPy, only where nothing is stored

    return describe(machine, dram_read_gbps(len(machine.cpu.affinity), passes=PASSES))


def complete(profile: MachineProfile) -> MachineProfile:
    """A stored profile with estimates for what a plan needs and it does not have."""
    rates = _estimates(profile.host.cores)
    gpu = profile.gpu
    part = part_of(gpu.name) if gpu is not None else None
    if gpu is not None and part is not None:
        known = known_machine(part.name)
        assert known.gpu is not None
        rates = {**known.rates, **rates}
        gpu = replace(gpu, multiprocessors=gpu.multiprocessors or known.gpu.multiprocessors)
    if profile.origin == "measured":  # rates that were measured stay apart from those that were not
        own = {n: replace(r, source=f"measured: {r.source}") for n, r in profile.rates.items()}
    else:
        own = dict(profile.rates)
    return replace(profile, gpu=gpu, rates={**rates, **own}, origin="catalogued")


def _estimates(cores: int) -> dict[str, Rate]:
    flops = cores * FLOPS_A_CYCLE * CLOCK_HZ / 1e9
    return {
        "cpu_flops_f32": Rate(flops, "GFLOP/s", "alone", "estimate: cores x 32 FLOPs x 3 GHz"),
        "disk_read": Rate(DISK_GBPS, "GB/s", "alone", "estimate: an NVMe drive on PCIe 4.0 x4"),
        "thread_wake": Rate(THREAD_WAKE_S, "s", "alone", "estimate"),
    }


def describe(machine: Machine, dram_gbps: float) -> MachineProfile:
    """The profile of a probed machine."""
    today = datetime.now(UTC).date().isoformat()
    cores = machine.cpu.num_cores
    rates = _estimates(cores) | {
        "dram_read": Rate(
            dram_gbps,
            "GB/s",
            "alone",
            f"measured {today}, NumPy's maximum, the fastest of {PASSES} passes",
        ),
    }
    gpu, link = None, None
    if machine.gpus:
        part = part_of(machine.gpus[0].name)
        gpu = GpuProfile(machine.gpus[0].name, machine.gpus[0].memory_total_nbytes)
        if part is not None:
            known = known_machine(part.name)
            rates = {**known.rates, **rates}
            assert known.gpu is not None
            gpu = GpuProfile(
                gpu.name, gpu.memory_nbytes, known.gpu.architecture, known.gpu.multiprocessors
            )
            link = LinkProfile(f"{known.link.name if known.link else ''} (assumed)")
        else:  # without rates nothing can be said about it
            note(
                f"{gpu.name} is not in the catalogue, so the plan is for the CPU; "
                "`headrace bench machine` measures the GPU"
            )
            gpu = None
    return MachineProfile(
        name="this",
        origin="catalogued",
        host=HostProfile(
            machine.cpu.model, max(1, cores), machine.memory.usable_total_nbytes, machine.cpu.isa
        ),
        gpu=gpu,
        link=link,
        rates=rates,
    )


# Words of a name that make another chip, with other rates or another memory, of the same number.
_OTHER_CHIP = frozenset(
    ("laptop", "max", "mobile", "super", "ti", "d", "pcie", "nvl", "40gb", "12gb")
)


def part_of(gpu_name: str) -> Part | None:
    """The catalogue's record of a GPU that the driver names, the longest name that matches.

    None where a word says that it is another chip than its number does: a laptop's RTX 4090 has 576 GB/s
    where the desktop's has 1,008.
    """

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z0-9]+", text.lower())) - {
            "nvidia",
            "geforce",
            "gpu",
            "sxm",
            "gb",
        }

    here = words(gpu_name)
    known = [p for p in parts().values() if p.kind == "gpu" and set(p.name.split("-")) <= here]
    best = max(known, key=lambda p: len(p.name), default=None)
    if best is not None and here & _OTHER_CHIP - words(best.title):
        return None
    return best
