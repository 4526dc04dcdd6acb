"""``headrace doctor`` on machines described by files, and on this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import doctor
from headrace.cli.main import main
from headrace.machine.probe import GpuInfo, probe_machine
from headrace.machine.threads import choose_threads
from tests.fixtures.fake_host import FakeCore, write, write_meminfo, write_topology

BUILT = doctor.Kernels({"cpu": None, "reference": None}, {"linear": "cpu"})
MISSING = doctor.Kernels(
    {"cpu": "no compiler was found", "reference": None}, {"linear": "reference"}
)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    cores = [FakeCore((i,)) for i in range(8)]
    cores += [FakeCore((i,), efficient=True) for i in range(8, 20)]
    write_topology(tmp_path, cores)
    write_meminfo(tmp_path, total_kib=31_250_000, available_kib=15_625_000)  # 32 and 16 GB
    write(tmp_path / "proc/cpuinfo", "model name : Toy 9000\nflags : avx2 fma")
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "600000 100000")
    return tmp_path


def text_of(root: Path, kernels: doctor.Kernels) -> str:
    machine = probe_machine(root, affinity=range(20))
    rows = doctor.lines(machine, choose_threads(machine.cpu), kernels)
    return "\n".join(f"{label}: {text}" for label, text in rows)


def test_it_says_what_is_here_and_what_will_be_used(host: Path) -> None:
    text = text_of(host, BUILT)
    assert "CPU: Toy 9000" in text
    assert "instruction sets: avx2 fma" in text
    assert "20 cores, 20 hardware threads (8 performance cores)" in text
    assert "CPU quota: 6 CPUs (cgroup v2)" in text
    assert "memory: 32.0 GB, 16.0 GB available" in text
    assert "GPU: none found" in text
    assert "C++ extension: built, and used" in text
    assert "will use: 6 threads: 8 performance cores, cgroup quota of 6 CPUs" in text


def test_it_says_why_the_extension_is_not_used(host: Path) -> None:
    assert "not used: no compiler was found. The PyTorch kernels serve" in text_of(host, MISSING)


def test_a_gpu_is_named_and_not_promised(host: Path) -> None:
    machine = probe_machine(host, affinity=range(20))
    gpu = GpuInfo(0, "NVIDIA H200", 150 * 10**9, 149 * 10**9, "580.95")
    seen = type(machine)(**{**machine.__dict__, "gpus": (gpu,)})
    rows = doctor.lines(seen, choose_threads(machine.cpu), BUILT)
    assert ("GPU 0", "NVIDIA H200, 150 GB, driver 580.95") in rows
    assert rows[-1][1] == "the CPU: this version has no GPU kernels"


def test_the_report_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "look_at_kernels", lambda: BUILT)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["will_use"]["threads"] >= 1
    assert report["machine"]["memory"]["total_nbytes"] > 0
    assert report["kernels"]["serving"] == {"linear": "cpu"}
    assert main(["doctor"]) == 0
    assert "will use" in capsys.readouterr().out


def test_b135_the_report_warns_of_a_mask_of_one_core(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = probe_machine(host, affinity=(3,))
    monkeypatch.setattr(doctor, "probe_machine", lambda gpus: machine)
    monkeypatch.setattr(doctor, "look_at_kernels", lambda: BUILT)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "allowed CPUs      1 of 20" in out
    assert "warning           this process may run on CPU 3 only" in out


def test_the_registry_is_asked() -> None:
    kernels = doctor.look_at_kernels()
    assert set(kernels.reasons) >= {"cpu", "reference"}
    assert kernels.reasons["reference"] is None
    assert set(kernels.serving.values()) <= {"cpu", "reference"}
