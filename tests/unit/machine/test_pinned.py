"""How much to pin, and noticing copies that do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.core.errors import MachineError
from headrace.machine.pages import HostBlock
from headrace.machine.pinned import (
    CudaPinner,
    NoPinner,
    cuda_round_trip,
    pin_budget,
    verify_copies,
)
from headrace.machine.probe import probe_machine
from tests.fixtures.fake_host import smt_cores, write, write_meminfo, write_topology

GIB = 1 << 30
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_b140_a_48_gb_host_keeps_a_quarter_of_its_memory(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    write_meminfo(tmp_path, total_kib=48 << 20, available_kib=46 << 20)
    memory = probe_machine(tmp_path, affinity=range(16)).memory
    assert pin_budget(memory, wsl=False).nbytes == 36 * GIB
    wsl = pin_budget(memory, wsl=True)
    assert wsl.nbytes == 24 * GIB
    assert "WSL" in wsl.reason
    assert pin_budget(memory, wsl=True, requested=40 * GIB).nbytes == 40 * GIB


def test_a_container_limit_counts(tmp_path: Path) -> None:
    write_topology(tmp_path, smt_cores(8))
    write_meminfo(tmp_path, total_kib=48 << 20, available_kib=46 << 20)
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/memory.max", 8 * GIB)
    memory = probe_machine(tmp_path, affinity=range(16)).memory
    assert pin_budget(memory, wsl=False).nbytes == 6 * GIB


def test_no_pinner_says_why() -> None:
    assert NoPinner("there is no CUDA device").pin(0, 1) == "there is no CUDA device"


def test_b139_copies_that_change_nothing_stop_the_load() -> None:
    samples = [torch.arange(256, dtype=torch.uint8), torch.full((100,), 3, dtype=torch.uint8)]
    assert verify_copies(samples, torch.clone) == 356
    with pytest.raises(MachineError, match="255 of 256 bytes came back changed") as caught:
        verify_copies(samples, torch.zeros_like)
    assert "driver" in (caught.value.hint or "")


@pytest.mark.gpu
@needs_gpu
def test_registered_memory_is_pinned_until_it_is_given_back() -> None:
    block = HostBlock(4 << 20)
    block.bytes[:] = 5
    tensor = torch.from_numpy(block.bytes)
    assert not tensor.is_pinned()
    pinner = CudaPinner()
    assert pinner.pin(block.address, block.nbytes) is None
    assert tensor.is_pinned()
    assert verify_copies([tensor], cuda_round_trip) == 4 << 20
    pinner.unpin(block.address)
    assert not tensor.is_pinned()


@pytest.mark.gpu
@needs_gpu
def test_a_refusal_is_a_reason_and_the_gpu_works_on() -> None:
    block = HostBlock(4 << 20)
    pinner = CudaPinner()
    assert pinner.pin(block.address, block.nbytes) is None
    reason = pinner.pin(block.address, block.nbytes)  # twice the same range
    assert reason is not None
    assert "already" in reason
    assert torch.ones(3, device="cuda").sum().item() == 3
    pinner.unpin(block.address)
