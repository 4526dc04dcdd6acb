"""``headrace doctor`` on machines described by files, and on this one."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.cli import doctor
from headrace.cli.main import main
from headrace.machine.probe import GpuInfo, probe_machine
from headrace.machine.profile import HostProfile, MachineProfile
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


def test_it_says_whether_matrix_tiles_are_used_and_why_not(host: Path) -> None:
    refused = dataclasses.replace(BUILT, no_tiles="the kernel refused the tile registers")
    assert "matrix tiles: none: the kernel refused the tile registers" in text_of(host, refused)
    used = dataclasses.replace(BUILT, isa="avx512_amx", no_tiles="")
    assert "matrix tiles: avx512_amx, in calls of more than 64 rows" in text_of(host, used)
    assert "matrix tiles" not in text_of(host, MISSING)


def test_cpus_are_listed_as_linux_does(host: Path) -> None:
    assert doctor._ranges([0, 1, 2, 3, 8, 16, 17]) == "0-3, 8, 16-17"
    assert doctor._ranges([5]) == "5"
    machine = probe_machine(host, affinity=range(20))
    threads = dataclasses.replace(choose_threads(machine.cpu), cpus=(2, 3, 4, 9))
    assert ("", "on CPU 2-4, 9") in doctor.lines(machine, threads, BUILT)


def test_a_gpu_is_named_and_not_promised(host: Path) -> None:
    machine = probe_machine(host, affinity=range(20))
    gpu = GpuInfo(0, "NVIDIA H200", 150 * 10**9, 149 * 10**9, "580.95")
    seen = type(machine)(**{**machine.__dict__, "gpus": (gpu,)})
    rows = doctor.lines(seen, choose_threads(machine.cpu), BUILT)
    assert ("GPU 0", "NVIDIA H200, 150 GB, driver 580.95") in rows
    assert rows[-1][1] == "the CPU, not the GPU: not looked at"
    ready = dataclasses.replace(BUILT, gpu=None)
    assert doctor.lines(seen, choose_threads(machine.cpu), ready)[-1][1].startswith("the GPU")
    assert doctor.report(seen, choose_threads(machine.cpu), ready)["will_use"]["device"] == "cuda"


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


def test_memory_of_both_kinds_and_the_profile(host: Path) -> None:
    machine = probe_machine(host, affinity=range(20))
    gpu = GpuInfo(0, "NVIDIA H200", 150 * 10**9, 120 * 10**9, "580.95")
    seen = dataclasses.replace(machine, gpus=(gpu,))
    profile = MachineProfile(
        name="desk",
        origin="measured",
        host=HostProfile("Toy 9000", 20, 32 * 10**9),
        best_threads=7,
        measured_at=(datetime.now(UTC) - timedelta(days=3)).isoformat(),
    )
    accounts = doctor.Accounts(24 * 10**9, "75% of 32.0 GB of usable RAM", profile, "/x/desk.json")
    rows = doctor.lines(seen, choose_threads(machine.cpu), BUILT, accounts)
    text = "\n".join(f"{label}: {text}" for label, text in rows)
    assert "pinned memory: at most 24.0 GB: 75% of 32.0 GB of usable RAM" in text
    assert "GPU 0 memory: 30.0 GB in use, 120 GB free" in text
    assert "machine profile: /x/desk.json" in text
    assert "measured 3 days ago; best number of CPU threads 7" in text
    data = doctor.report(seen, choose_threads(machine.cpu), BUILT, accounts)
    assert data["pinned_memory"]["limit_nbytes"] == 24 * 10**9
    assert data["profile"]["best_threads"] == 7
    assert round(data["profile"]["age_days"]) == 3
    assert "disturbed" not in text
    now = dataclasses.replace(profile, measured_at=datetime.now(UTC).isoformat())
    fresh = dataclasses.replace(accounts, profile=now)
    rows = doctor.lines(seen, choose_threads(machine.cpu), BUILT, fresh)
    assert any(text.startswith("measured today;") for _, text in rows)
    assert data["profile"]["disturbed"] == {}
    busy = dataclasses.replace(
        accounts, profile=dataclasses.replace(profile, disturbed={"CPU experts": 0.31})
    )
    rows = doctor.lines(seen, choose_threads(machine.cpu), BUILT, busy)
    assert any(
        text.startswith("disturbed: other programs kept 31% of the CPUs") for _, text in rows
    )
    data = doctor.report(seen, choose_threads(machine.cpu), BUILT, busy)
    assert data["profile"]["disturbed"] == {"CPU experts": 0.31}


def test_without_a_profile_it_says_how_to_get_one(
    host: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_PROFILES", str(tmp_path / "none"))
    machine = probe_machine(host, affinity=range(20))
    accounts = doctor.look_at_accounts(machine)
    rows = doctor.lines(machine, choose_threads(machine.cpu), BUILT, accounts)
    assert ("machine profile", "none; `headrace bench machine` measures one") in rows
    assert ("pinned memory", "none: there is no GPU to read it") in rows
