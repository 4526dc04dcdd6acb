"""Thread counts from fake hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.machine.probe import CpuInfo, probe_machine
from headrace.machine.threads import best_threads, choose_threads, cpus_apart, thread_candidates
from tests.fixtures.fake_host import FakeCore, smt_cores, write, write_topology


def cpu_of(root: Path, affinity: range | tuple[int, ...]) -> CpuInfo:
    return probe_machine(root, affinity=affinity).cpu


@pytest.mark.parametrize("version", [1, 2])
def test_b133_quota_and_affinity(tmp_path: Path, version: int) -> None:
    write_topology(tmp_path, [FakeCore((i,)) for i in range(48)])
    if version == 2:
        write(tmp_path / "proc/self/cgroup", "0::/")
        write(tmp_path / "sys/fs/cgroup/cpu.max", "765000 100000")
    else:
        write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/")
        write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 765000)
        write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    choice = choose_threads(cpu_of(tmp_path, range(48)))
    assert choice.threads == 7
    assert len(choice.cpus) == 7
    assert "7.65" in choice.reason
    narrow = choose_threads(cpu_of(tmp_path, (3, 9, 20, 47)))
    assert (narrow.threads, narrow.cpus) == (4, (3, 9, 20, 47))


def test_a_quota_below_one_cpu_gives_one_thread(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(4))
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000")
    assert choose_threads(cpu_of(tmp_path, range(8))).threads == 1


def test_b134_hybrid_without_smt(tmp_path: Path) -> None:
    cores = [FakeCore((i,)) for i in range(8)]
    cores += [FakeCore((i,), efficient=True) for i in range(8, 20)]
    write_topology(tmp_path, cores)
    choice = choose_threads(cpu_of(tmp_path, range(20)))
    assert (choice.threads, choice.cpus) == (8, tuple(range(8)))


def test_b134_smt(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    choice = choose_threads(cpu_of(tmp_path, range(16)))
    assert (choice.threads, choice.cpus) == (8, tuple(range(8)))


def test_b134_smt_with_neighbouring_siblings(tmp_path: Path) -> None:
    write_topology(tmp_path, [FakeCore((2 * i, 2 * i + 1)) for i in range(8)])
    assert choose_threads(cpu_of(tmp_path, range(16))).cpus == (0, 2, 4, 6, 8, 10, 12, 14)


def test_a_mask_of_efficiency_cores_only(tmp_path: Path) -> None:
    cores = [FakeCore((0,)), FakeCore((1,), efficient=True), FakeCore((2,), efficient=True)]
    write_topology(tmp_path, cores)
    assert choose_threads(cpu_of(tmp_path, (1, 2))).cpus == (1, 2)


def test_b135_one_core_mask_is_reported(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    choice = choose_threads(cpu_of(tmp_path, (5,)))
    assert (choice.threads, choice.cpus) == (1, (5,))
    assert "affinity mask of 1 of 16" in choice.reason
    (warning,) = choice.warnings
    assert "CPU 5 only" in warning


def test_a_host_loop_keeps_a_core(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    assert choose_threads(cpu_of(tmp_path, range(16)), reserve=1).threads == 7


def test_a_request_is_taken_as_it_is(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(4))
    cpu = cpu_of(tmp_path, range(8))
    few = choose_threads(cpu, 2)
    assert (few.threads, few.cpus, few.warnings) == (2, (0, 1), ())
    many = choose_threads(cpu, 6)
    assert (many.threads, many.cpus) == (6, (0, 1, 2, 3, 4, 5))
    assert len(many.warnings) == 1
    with pytest.raises(ConfigError, match="at least 1"):
        choose_threads(cpu, 0)


def test_candidates_are_the_topologys_and_its_neighbours(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    cpu = cpu_of(tmp_path, range(16))
    # beside a GPU 8 - 1; physical - 1, physical, logical - 1
    assert thread_candidates(cpu, beside_gpu=True) == (7, 8, 15)
    assert thread_candidates(cpu_of(tmp_path, (0,)), beside_gpu=True) == (1,)


def test_b133_candidates_stay_within_the_quota(tmp_path: Path) -> None:
    write_topology(tmp_path, [FakeCore((i,)) for i in range(16)])
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "765000 100000")
    assert thread_candidates(cpu_of(tmp_path, range(16)), beside_gpu=False) == (7,)


def test_b134_candidates_of_a_hybrid_cpu(tmp_path: Path) -> None:
    cores = [FakeCore((i,)) for i in range(8)]
    cores += [FakeCore((i,), efficient=True) for i in range(8, 20)]
    write_topology(tmp_path, cores)
    assert thread_candidates(cpu_of(tmp_path, range(20)), beside_gpu=False) == (8, 19, 20)


@pytest.mark.parametrize(
    ("rounds", "start", "best"),
    [
        # one thread more than the host loop leaves halves everything
        ({14: [118.0] * 3, 15: [129.0] * 3, 16: [60.0] * 3}, 15, 15),
        # 8 read as much as the topology's 15: within noise the topology's stays
        ({8: [79.0] * 3, 15: [80.0] * 3}, 15, 15),
        # one core reads all that the memory gives, and the second one was busy now and then
        ({1: [21.0, 20.0, 22.0, 21.0, 20.5], 2: [20.0, 12.0, 21.5, 9.0, 20.4]}, 2, 2),
        # 30% in the median, but slower in one round: what disturbed the others is no property of the machine
        ({1: [20.0, 20.0, 20.0, 20.0, 20.0], 2: [14.0, 14.0, 14.0, 21.0, 14.0]}, 2, 2),
        # faster each time, by less than what repeated measurements differ by
        ({4: [20.0] * 3, 7: [21.9] * 3}, 4, 4),
        # clearly faster each time; of two such counts that are about equal the one that leaves more room
        ({4: [20.0, 10.0, 20.0], 7: [24.0, 12.0, 24.0]}, 4, 7),
        ({4: [20.0] * 3, 7: [29.8] * 3, 8: [30.0] * 3}, 4, 7),
        ({4: [20.0] * 3, 7: [28.0] * 3, 8: [30.0] * 3}, 4, 8),
        ({3: [30.0] * 3}, 3, 3),
    ],
)
def test_another_count_than_the_topologys_has_to_be_clearly_better(
    rounds: dict[int, list[float]], start: int, best: int
) -> None:
    assert best_threads(rounds, start) == best


def test_the_profiles_count_replaces_the_topologys(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    choice = choose_threads(cpu_of(tmp_path, range(16)), measured=15)
    assert (choice.threads, len(choice.cpus)) == (15, 15)
    assert "profile's best is 15" in choice.reason
    narrow = choose_threads(cpu_of(tmp_path, range(4)), measured=15)
    assert narrow.threads == 4
    assert "4 CPUs are allowed now" in narrow.reason
    assert choose_threads(cpu_of(tmp_path, range(16)), 3, measured=15).threads == 3


def test_pinned_threads_leave_a_cpu_to_the_rest(tmp_path: Path) -> None:
    write_topology(tmp_path, [FakeCore((i,)) for i in range(16)])
    cpu = cpu_of(tmp_path, range(16))
    assert cpus_apart(cpu, 15) == tuple(range(1, 16))
    assert cpus_apart(cpu, 14) == tuple(range(1, 15))
    assert cpus_apart(cpu, 8) == tuple(range(1, 9))
    assert cpus_apart(cpu, 7) is None, "the system finds free CPUs better"
    assert cpus_apart(cpu, 16) is None, "none would be left"
    assert cpus_apart(cpu_of(tmp_path, (3, 9, 20)), 2) == (9, 20)
    assert cpus_apart(cpu_of(tmp_path, (5,)), 1) is None


def test_pinned_threads_take_a_cpu_of_each_core_first(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(4))  # CPU i and i + 4 share a core
    cpu = cpu_of(tmp_path, range(8))
    assert cpus_apart(cpu, 4) == (1, 2, 3, 4)
    assert cpus_apart(cpu, 7) == tuple(range(1, 8))


def test_threads_are_not_pinned_under_a_quota(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(4))
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "600000 100000")
    assert cpus_apart(cpu_of(tmp_path, range(8)), 6) is None
