"""Machines described by files: topology, quotas, memory, and systems without such files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from headrace.machine import probe as probe_module
from headrace.machine.cgroup import read_cgroup
from headrace.machine.probe import parse_cpu_list, probe_machine, read_gpus
from tests.fixtures.fake_host import FakeCore, smt_cores, write, write_meminfo, write_topology

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Path:
    write_topology(tmp_path, smt_cores(8))
    write_meminfo(tmp_path, total_kib=32 << 20, available_kib=30 << 20)
    write(
        tmp_path / "proc/cpuinfo",
        "model name\t: Toy 9000\nflags\t\t: fpu sse avx2 fma f16c amx_int8",
    )
    return tmp_path


def test_parse_cpu_list() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("") == ()


def test_topology_name_and_memory(host: Path) -> None:
    machine = probe_machine(host, affinity=range(16))
    assert (machine.cpu.num_cores, len(machine.cpu.cpus), machine.cpu.smt) == (8, 16, True)
    assert machine.cpu.model == "Toy 9000"
    assert machine.cpu.isa == ("avx2", "fma", "f16c", "amx_int8")
    assert machine.memory.total_nbytes == 32 * GIB
    assert machine.memory.usable_available_nbytes == 30 * GIB
    assert not machine.wsl


def test_wsl(host: Path) -> None:
    write(host / "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2")
    assert probe_machine(host, affinity=(0,)).wsl


def test_arm_capacities_make_two_classes(tmp_path: Path) -> None:
    # One prime core, three large, four small, as phones and some boards have them.
    capacities = [1024, 905, 905, 905, 350, 350, 350, 350]
    write_topology(tmp_path, [FakeCore((i,), capacity=c) for i, c in enumerate(capacities)])
    cpu = probe_machine(tmp_path, affinity=range(8)).cpu
    assert cpu.hybrid
    assert cpu.num_performance_cores == 4


def test_cgroup_v2_takes_the_tightest_level(host: Path) -> None:
    write(host / "proc/self/cgroup", "0::/a.slice/b.scope")
    top = host / "sys/fs/cgroup"
    write(top / "a.slice/cpu.max", "400000 100000")
    write(top / "a.slice/memory.max", 8 * GIB)
    write(top / "a.slice/memory.current", 3 * GIB)
    write(top / "a.slice/memory.stat", f"anon 5\ninactive_file {GIB}")
    write(top / "a.slice/b.scope/cpu.max", "max 100000")
    write(top / "a.slice/b.scope/memory.max", "max")
    group = read_cgroup(host)
    assert (group.version, group.quota_cpus) == (2, 4.0)
    assert (group.memory_limit_nbytes, group.memory_used_nbytes) == (8 * GIB, 2 * GIB)
    memory = probe_machine(host, affinity=(0,)).memory
    assert memory.usable_total_nbytes == 8 * GIB
    assert memory.usable_available_nbytes == 6 * GIB


def test_cgroup_v1(host: Path) -> None:
    write(host / "proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/")
    # Inside the container only the mounts' own level exists.
    write(host / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", 765000)
    write(host / "sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    write(host / "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    group = read_cgroup(host)
    assert (group.version, group.quota_cpus, group.memory_limit_nbytes) == (1, 7.65, None)


def test_cgroup_v1_without_limit(host: Path) -> None:
    write(host / "proc/self/cgroup", "4:cpu:/\n")
    write(host / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1)
    write(host / "sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    assert read_cgroup(host).quota_cpus is None


def test_no_cgroup_files(tmp_path: Path) -> None:
    assert read_cgroup(tmp_path).version == 0


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_other_systems_answer_what_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """No proc, no sys, no affinity call: psutil's counts, and unknown where nobody knows."""
    monkeypatch.setattr(probe_module.platform, "system", lambda: system)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    machine = probe_machine(tmp_path)
    assert machine.cpu.num_cores >= 1
    assert machine.cpu.affinity == tuple(c.id for c in machine.cpu.cpus)
    assert machine.memory.total_nbytes > 0
    assert machine.cpu.quota_cpus is None
    assert machine.cpu.model == "unknown"


def test_nvidia_smi_rows_and_broken_rows() -> None:
    text = "0, NVIDIA H200, 143771, 143000, 580.95\n1, NVIDIA GB10, [N/A], [N/A], 580.95\n"
    (gpu,) = read_gpus(lambda command: text)
    assert gpu.name == "NVIDIA H200"
    assert gpu.memory_total_nbytes == 143771 * 1024 * 1024
    assert read_gpus(lambda command: None) == ()


def test_records_are_plain_data(host: Path) -> None:
    described = dataclasses.asdict(probe_machine(host, affinity=(0, 1)))
    assert described["cpu"]["affinity"] == (0, 1)
