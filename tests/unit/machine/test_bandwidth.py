"""What is measured, in which circumstances, and what follows: with fake loads and a fake GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headrace.machine.bandwidth import HostLoads, Load, Measurement
from headrace.machine.disturbance import CpuClock, Watch
from headrace.machine.dram_probe import dram_read_gbps
from headrace.machine.link import link_peak_gbps, read_link
from headrace.machine.peaks import published_peaks
from headrace.machine.probe import Machine, probe_machine
from headrace.machine.profile import GpuProfile, LinkProfile, MachineProfile
from headrace.machine.profile_store import machine_key, profiles_folder, save_profile
from headrace.machine.quick_probe import pcie_h2d_gbps, starting_rates
from tests.fixtures.fake_host import smt_cores, write, write_meminfo, write_topology


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    write_topology(tmp_path, smt_cores(8))
    write_meminfo(tmp_path, total_kib=64 << 20, available_kib=60 << 20)
    write(tmp_path / "proc/cpuinfo", "model name : Toy 9000\nflags : avx2")
    return probe_machine(tmp_path, affinity=range(16))


class Quiet(Watch):
    """Nobody else is at work, whatever runs on the machine of this test."""

    def __init__(self) -> None:
        super().__init__(lambda: CpuClock(0.0, 0.0, 0.0), lambda seconds: None)


class FakeGpu:
    """A link of 50 GB/s; what runs beside it can see that it is busy."""

    def __init__(self) -> None:
        self.profile = GpuProfile("Toy GPU", 8 << 30, "sm_90")
        self.link = self
        self.busy = False
        self.kinds: list[str] = []

    def rate(self, kind: str, busy: Callable[[], bool]) -> float:
        self.busy = True
        self.kinds.append(kind)
        while busy():
            time.sleep(0.001)
        self.busy = False
        return 45.0

    def rate_alone(self, kind: str, seconds: float) -> float:
        return 50.0

    def hbm_read_gbps(self) -> float:
        return 4000.0

    def product_gflops(self, dtype: str) -> float | None:
        return None if dtype == "fp8" else 9e5

    def launch_times(self) -> dict[str, float]:
        return {"kernel_launch": 4e-6, "graph_launch": 6e-6, "graph_kernel": 1e-6}

    def flag_round_trip_s(self) -> float | None:
        return None  # lost


class FakeHost:
    """Reads 10 GB/s a thread; experts 9, and ``crowding`` of it with all cores beside the link."""

    def __init__(self, gpu: FakeGpu | None, crowding: float = 0.5) -> None:
        self.gpu, self.crowding = gpu, crowding
        self.seen: list[tuple[int, int]] = []
        self.opened: list[str] = []

    def read(self, threads: int, cpus: Sequence[int], seconds: float) -> float:
        time.sleep(0.005)  # so that the link can begin
        self.seen.append((threads, len(cpus)))
        return 10.0 * threads

    def experts(self, threads: int, cpus: Sequence[int], seconds: float) -> float:
        time.sleep(0.005)
        crowded = self.gpu is not None and self.gpu.busy and threads >= 8
        return 9.0 * threads * (self.crowding if crowded else 1.0)

    @contextmanager
    def open(self, fmt: str) -> Generator[Load, None, None]:
        self.opened.append(fmt)
        yield self.experts


def measure(
    machine: Machine, gpu: FakeGpu | None, crowding: float = 0.5
) -> tuple[MachineProfile, FakeHost]:
    host = FakeHost(gpu, crowding)
    opens = {fmt: lambda fmt=fmt: host.open(fmt) for fmt in ("mxfp4", "bf16")}
    link = LinkProfile("PCIe 5.0 x16")
    loads = HostLoads(host.read, opens)
    stages: list[float] = []
    profile = Measurement(
        machine,
        loads,
        gpu,
        link,
        lambda stage, done: stages.append(done),
        seconds=0.001,
        watch=Quiet(),
    ).run()
    assert stages == sorted(stages)
    assert stages[-1] == 1.0
    return MachineProfile.from_json(profile.to_json()), host


def test_beside_a_gpu_the_sum_of_both_paths_decides(machine: Machine) -> None:
    profile, host = measure(machine, FakeGpu())
    # alone 15 threads give 135 and the topology's 7 give 63; beside the link's 45 it is 112.5 against 108,
    # 4% more, which is no reason to leave the topology's
    assert profile.gbps("cpu_experts_mxfp4_t15") == 135
    assert profile.gbps("cpu_experts_mxfp4_t8_overlapped") == 36
    assert profile.gbps("cpu_experts_mxfp4_t15_overlapped") == 67.5
    assert profile.best_threads == 7
    assert profile.gbps("cpu_experts_mxfp4_overlapped") == 63
    assert profile.gbps("cpu_experts_bf16") == 63
    assert profile.gbps("dram_read") == 70
    assert {t for t, _ in host.seen} == {1, 2, 4, 7, 8, 15}
    assert all(cpus == threads for threads, cpus in host.seen)
    assert host.opened == ["mxfp4", "bf16"]  # the experts in mxfp4 are made once


def test_beside_a_gpu_a_count_with_clearly_more_of_both_paths_is_taken(machine: Machine) -> None:
    profile, _ = measure(machine, FakeGpu(), crowding=1.0)
    assert profile.gbps("cpu_experts_mxfp4_overlapped") == 135  # 180 with the link against 108
    assert profile.best_threads == 15


def test_rates_alone_and_overlapped_stand_side_by_side(machine: Machine) -> None:
    gpu = FakeGpu()
    profile, _ = measure(machine, gpu)
    for kind in ("h2d", "d2h", "gather"):
        assert profile.gbps(f"pcie_{kind}") == 50
        assert profile.gbps(f"pcie_{kind}_overlapped") == 45
    assert set(gpu.kinds) == {"h2d", "d2h", "gather"}
    assert profile.rates["kernel_launch"].unit == "s"
    assert profile.rates["gpu_flops_bf16"].value == 9e5
    # what could not be measured is not in the profile
    assert "gpu_flops_fp8" not in profile.rates
    assert "flag_round_trip" not in profile.rates
    assert profile.link == LinkProfile("PCIe 5.0 x16")
    assert profile.measured_at.endswith("+00:00")


def test_without_a_gpu_there_are_host_rates_only(machine: Machine) -> None:
    profile, _ = measure(machine, None)
    assert (profile.gpu, profile.link) == (None, None)
    assert profile.best_threads == 15
    assert not any(name.endswith("overlapped") for name in profile.rates)
    assert not any(name.startswith(("pcie", "gpu", "hbm")) for name in profile.rates)
    assert profile.rates["cpu_flops_f32"].unit == "GFLOP/s"


def test_without_expert_kernels_the_read_loop_chooses(machine: Machine) -> None:
    host = FakeHost(None)
    profile = Measurement(machine, HostLoads(host.read, {}), seconds=0.001, watch=Quiet()).run()
    assert profile.best_threads == 15
    assert profile.gbps("dram_read") == 150
    assert not any(name.startswith("cpu_experts") for name in profile.rates)


@pytest.mark.parametrize(
    ("one_gflops", "best"),
    [
        (100.0, 8),  # memory alone would take 7: the arithmetic of 8 threads is 1.6 times as fast
        (159.0, 7),  # as much arithmetic with one thread less
    ],
)
def test_without_a_gpu_fewer_threads_must_not_cost_arithmetic(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, one_gflops: float, best: int
) -> None:
    def read(threads: int, cpus: Sequence[int], seconds: float) -> float:
        return {7: 40.0, 8: 30.0, 15: 30.0}.get(threads, 10.0)

    def gflops(dtype: str, seconds: float, threads: int) -> float:
        return 160.0 if threads == 8 else one_gflops

    monkeypatch.setattr("headrace.machine.bandwidth._cpu_gflops", gflops)
    profile = Measurement(machine, HostLoads(read, {}), seconds=0.001, watch=Quiet()).run()
    assert profile.best_threads == best
    assert profile.gbps("dram_read") == {7: 40.0, 8: 30.0}[best]


def test_one_disturbed_round_changes_neither_the_count_nor_its_rate(machine: Machine) -> None:
    calls: dict[int, int] = {}

    def read(threads: int, cpus: Sequence[int], seconds: float) -> float:
        calls[threads] = calls.get(threads, 0) + 1
        # The curve asks first, so that call 3 is the second round of five.
        return 5.0 if threads == 8 and calls[8] == 3 else {7: 40.0, 8: 42.0}.get(threads, 40.0)

    profile = Measurement(machine, HostLoads(read, {}), seconds=0.001, watch=Quiet()).run()
    assert profile.best_threads == 8
    assert profile.gbps("dram_read") == 42.0  # the median of 42, 5, 42, 42, 42


class Neighbour(Watch):
    """Others whose share of the CPUs is given for each group of measurements; 0 once it ends."""

    def __init__(self, *shares: float) -> None:
        super().__init__(lambda: CpuClock(0.0, 0.0, 0.0), lambda seconds: None)
        self.shares, self.share, self.waits = list(shares), 0.0, 0

    def during(self, measure: Callable[[], None]) -> float:
        self.share = self.shares.pop(0) if self.shares else 0.0
        measure()
        return self.share

    def wait(self) -> None:
        self.waits += 1


def disturbed_by(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, *shares: float, again_s: float = 40.0
) -> tuple[MachineProfile, Neighbour, list[int]]:
    """Reads of 100 GB/s, products of 1,000 GFLOP/s, less what others take."""
    watch, counts = Neighbour(*shares), list[int]()

    def read(threads: int, cpus: Sequence[int], seconds: float) -> float:
        counts.append(threads)
        return 100.0 * (1 - watch.share)

    monkeypatch.setattr(
        "headrace.machine.bandwidth._cpu_gflops", lambda *args: 1000.0 * (1 - watch.share)
    )
    loads = HostLoads(read, {})
    found = Measurement(machine, loads, seconds=0.001, watch=watch, again_s=again_s).run()
    return MachineProfile.from_json(found.to_json()), watch, counts


def test_a_disturbed_group_is_measured_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, once = disturbed_by(machine, monkeypatch)
    # groups: memory, threads, experts, products; the curve and the products find a neighbour that leaves
    profile, watch, counts = disturbed_by(machine, monkeypatch, 0.4, 0.0, 0.0, 0.0, 0.5, 0.0)
    assert profile.disturbed == {}
    assert profile.gbps("dram_read_t8") == 100
    assert profile.rates["cpu_flops_f32"].value == 1000
    assert watch.waits == 2
    curve = once[: len({1, 2, 4, 7, 8, 15})]
    assert counts == curve + once


def test_who_stays_is_told_and_the_better_of_two_is_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # memory 40% then 60%; threads 5%, which is nothing; experts; products 50% then 30%
    profile, watch, _ = disturbed_by(machine, monkeypatch, 0.4, 0.6, 0.05, 0.0, 0.5, 0.3)
    assert profile.disturbed == {"reading memory": 0.4, "CPU products": 0.3}
    assert profile.gbps("dram_read_t1") == 60  # of the first turn; the second had 40
    assert profile.rates["cpu_flops_bf16"].value == 700  # of the second; the first had 500
    assert watch.waits == 2


def test_without_time_nothing_is_repeated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, watch, _ = disturbed_by(machine, monkeypatch, 0.4, 0.0, 0.0, 0.3, again_s=0.0)
    assert profile.disturbed == {"reading memory": 0.4, "CPU products": 0.3}
    assert profile.gbps("dram_read_t1") == 60
    assert watch.waits == 0


def test_a_repeated_group_forgets_what_the_first_turn_chose(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of threads chosen beside others are no longer in the profile, nor the experts' rates."""
    watch = Neighbour(0.0, 0.5, 0.0, 0.2, 0.0)
    calls = list[str]()

    @contextmanager
    def opened(fmt: str) -> Generator[Load, None, None]:
        calls.append(fmt)
        # beside others 7 threads do best, alone 15
        yield lambda n, cpus, s: {7: 50.0}.get(n, 20.0) if watch.share else 9.0 * n

    monkeypatch.setattr("headrace.machine.bandwidth._cpu_gflops", lambda *args: 1000.0)
    opens = {fmt: lambda fmt=fmt: opened(fmt) for fmt in ("mxfp4", "bf16")}
    loads = HostLoads(lambda n, cpus, s: 10.0 * n, opens)
    profile = Measurement(machine, loads, seconds=0.001, watch=watch).run()
    assert profile.best_threads == 15
    assert profile.gbps("cpu_experts_mxfp4") == 135
    assert profile.gbps("cpu_experts_bf16") == 135
    assert calls == ["mxfp4", "mxfp4", "bf16", "bf16"]


def test_threads_of_torch_are_put_back(machine: Machine) -> None:
    before = torch.get_num_threads()
    measure(machine, None)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("text", "name", "peak"),
    [
        ("5, 16\n", "PCIe 5.0 x16", 63.0),
        ("4, 8\n4, 8\n", "PCIe 4.0 x8", 15.75),
        ("3, 16", "PCIe 3.0 x16", 15.75),
    ],
)
def test_the_link_and_its_peak(text: str, name: str, peak: float) -> None:
    link = read_link(lambda command: text)
    assert link == LinkProfile(name)
    assert link_peak_gbps(link) == pytest.approx(peak, abs=0.02)


@pytest.mark.parametrize("text", [None, "", "[N/A], [N/A]\n", "5\n"])
def test_an_unknown_link(text: str | None) -> None:
    assert read_link(lambda command: text) is None
    assert link_peak_gbps(None) is None
    assert link_peak_gbps(LinkProfile("NVLink-C2C")) is None


def test_quick_probes_give_a_rate() -> None:
    assert dram_read_gbps(2, nbytes=8 << 20) > 0


def test_rates_to_begin_with(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr("headrace.machine.quick_probe.dram_read_gbps", lambda threads: 40.0)
    monkeypatch.setattr("headrace.machine.quick_probe.pcie_h2d_gbps", lambda: None)
    rates, probed = starting_rates(machine, 8)
    assert probed
    assert {name: rate.value for name, rate in rates.items()} == {"dram_read": 40.0}
    profile, _ = measure(machine, None)
    save_profile(profile, machine_key(machine.cpu, None), profiles_folder())
    rates, probed = starting_rates(machine, 8)
    assert not probed
    assert rates == profile.rates


def test_published_peaks_are_of_the_same_chip() -> None:
    peaks = published_peaks(GpuProfile("NVIDIA H200", 150 << 30, "sm_90", 132))
    assert peaks["gpu_flops_bf16"] == 989_000
    assert peaks["gpu_flops_f16"] == 989_000
    assert peaks["hbm_read"] == 4800
    assert published_peaks(GpuProfile("NVIDIA H200", 150 << 30, "sm_90", 60)) == {}
    assert published_peaks(GpuProfile("NVIDIA H", 150 << 30, "sm_90", 132)) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_quick_pcie_probe_without_a_gpu() -> None:
    assert pcie_h2d_gbps() is None
