"""Stored profiles: one for each pair of GPU and CPU, found again, and damage that is not fatal."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.machine.known import known_machine
from headrace.machine.probe import GpuInfo, probe_machine
from headrace.machine.profile import HostProfile, MachineProfile
from headrace.machine.profile_store import (
    MachineKey,
    age_days,
    find_profile,
    machine_key,
    profiles_folder,
    save_profile,
    with_profile,
)
from tests.fixtures.fake_host import smt_cores, write, write_topology

PROFILE = MachineProfile(
    name="desk",
    origin="measured",
    host=HostProfile("Toy 9000", 8, 64 << 30),
    measured_at="2026-11-20T12:00:00+00:00",
)
KEY = MachineKey("NVIDIA H200", "Toy 9000", 8)


def test_a_profile_is_found_for_its_machine_only(tmp_path: Path) -> None:
    folder = tmp_path / "machines"
    path = save_profile(PROFILE, KEY, folder)
    assert path.name.startswith("nvidia-h200-toy-9000-8c-")
    found, where = find_profile(KEY, folder)
    assert (found, where) == (PROFILE, str(path))
    for other in (
        MachineKey(None, "Toy 9000", 8),
        MachineKey("NVIDIA H200", "Toy 9000", 16),
        MachineKey("NVIDIA H200 ", "Toy 9000", 8),  # the same slug
    ):
        missing, why = find_profile(other, folder)
        assert missing is None
        assert "headrace bench machine" in why


def test_a_profile_of_another_version_is_measured_again(tmp_path: Path) -> None:
    path = save_profile(PROFILE, KEY, tmp_path)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    found, why = find_profile(KEY, tmp_path)
    assert found is None
    assert "version" in why


def test_the_folder(tmp_path: Path) -> None:
    assert profiles_folder({"HEADRACE_PROFILES": str(tmp_path)}) == tmp_path
    cache = profiles_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert cache == tmp_path / "headrace" / "machines"
    assert profiles_folder({}).name == "machines"


def test_age() -> None:
    assert age_days(PROFILE, datetime(2026, 11, 22, tzinfo=UTC)) == 1.5
    unsaid = replace(PROFILE, measured_at="2026-11-20T12:00:00")
    assert age_days(unsaid, datetime(2026, 11, 22, tzinfo=UTC)) == 1.5
    assert age_days(MachineProfile("x", "catalogued", PROFILE.host)) is None


def test_a_machine_takes_the_threads_of_its_profile(tmp_path: Path) -> None:
    write_topology(tmp_path / "root", smt_cores(8))
    write(tmp_path / "root/proc/cpuinfo", "model name : Toy 9000")
    machine = probe_machine(tmp_path / "root", affinity=range(16))
    assert with_profile(machine, tmp_path).measured_threads is None
    save_profile(replace(PROFILE, best_threads=7), machine_key(machine.cpu, None), tmp_path)
    assert with_profile(machine, tmp_path).measured_threads == 7
    gpu = replace(machine, gpus=(GpuInfo(0, "NVIDIA H200", 1, 1, "580"),))
    assert with_profile(gpu, tmp_path).measured_threads is None  # measured without it


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("value", float("inf"), "Infinity"),
        ("value", float("nan"), "NaN"),
        ("unit", "s", "it must be 'GB/s'"),
    ],
)
def test_rates_that_mean_nothing_are_refused(field: str, value: object, message: str) -> None:
    data = json.loads(known_machine("rtx-4090").to_json())
    data["rates"]["hbm_read"][field] = value
    with pytest.raises(ConfigError, match=message) as caught:
        MachineProfile.from_json(json.dumps(data))
    assert caught.value.hint
