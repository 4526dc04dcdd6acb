"""Both devices behind the one interface; the CUDA half runs where there is a GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.errors import MachineError
from headrace.machine.cuda_device import CONTEXT_NBYTES, context_nbytes
from headrace.machine.device import CudaDevice, Device, HostDevice
from headrace.machine.device_api import DeviceMemory
from headrace.models.loader import load_model
from headrace.ops.records import LayerKV
from headrace.ops.registry import resolve
from tests.fixtures.paging import Pages
from tests.fixtures.toy import write_gpt_oss


def use_streams(device: Device) -> None:
    first, second, done = device.stream(), device.stream(), device.event()
    with device.use(first):
        x = torch.full((1024,), 3.0, device=device.torch_device) * 2
        done.record(first)
    second.wait_event(done)
    with device.use(second):
        y = x + 1
    second.synchronize()
    done.synchronize()
    device.synchronize()
    assert y.sum().item() == 7 * 1024


def test_host_streams_and_events() -> None:
    use_streams(HostDevice())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_a_machine_error_with_a_hint() -> None:
    with pytest.raises(MachineError, match="no CUDA device") as caught:
        CudaDevice()
    assert "nvidia-smi" in (caught.value.hint or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_streams_and_events() -> None:
    use_streams(CudaDevice())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_only_recording_has_a_stream_of_its_own() -> None:
    """What warms a capture up is launched on the caller's stream, and all captures share one other."""
    device = CudaDevice()
    seen: list[tuple[int, ...]] = []
    word = torch.zeros(4, device=device.torch_device)
    for _ in range(2):
        streams: list[int] = []

        def work(streams: list[int] = streams) -> tuple[torch.Tensor, ...]:
            streams.append(torch.cuda.current_stream().cuda_stream)
            return (word.add_(1.0),)

        graph = device.graph()
        graph.capture(work)
        graph.replay()
        seen.append(tuple(streams))
    here = torch.cuda.current_stream().cuda_stream
    assert seen[0] == seen[1]
    assert seen[0][:-1] == (here,) * (len(seen[0]) - 1)
    assert seen[0][-1] != here
    # Of each: warming up, and one replay. Recording computes nothing.
    runs = len(seen[0]) - 1 + 1
    assert word.tolist() == [2.0 * runs] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_can_be_made_after_all_others_are_gone() -> None:
    """The memory pool outlives them, also where cuBLAS keeps its workspace in it."""
    device = CudaDevice()
    x = torch.ones(64, 64, device=device.torch_device)
    for _ in range(2):
        graph = device.graph()
        (out,) = graph.capture(lambda: (x @ x,))
        graph.replay()
        assert out.eq(64.0).all()
        del graph, out
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_mixture_on_the_gpu_gives_the_logits_of_the_host(tmp_path: Path) -> None:
    """Nothing in layers, decoder or reference operations assumes a CPU."""
    toy = write_gpt_oss(tmp_path / "toy")
    ids = torch.arange(40) % 250
    logits: list[torch.Tensor] = []
    for device in (HostDevice(), CudaDevice()):
        place = device.torch_device
        decoder = load_model(open_checkpoint(str(toy.path)), resolve(("reference",)), device)
        pages = Pages(decoder.spec)
        batch = pages.batch([(pages.sequence(), len(ids))])
        moved = {
            f.name: getattr(batch, f.name).to(place)
            for f in fields(batch)
            if isinstance(getattr(batch, f.name), torch.Tensor)
        }
        kv = [LayerKV(c.keys.to(place), c.values.to(place)) for c in pages.kv]
        hidden = decoder.forward(ids.to(place), replace(batch, **moved), kv)
        logits.append(decoder.logits(hidden).cpu())
    # float32 on both; sums in another order
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].abs().max()


def test_what_other_processes_take_meanwhile_is_not_the_drivers():
    gib, mib = 2**30, 2**20
    now = DeviceMemory(80 * gib, 70 * gib, 3 * gib, 2 * gib)
    assert context_nbytes(now, 73 * gib + 500 * mib) == 500 * mib
    assert context_nbytes(now, 72 * gib) == 0  # somebody gave memory back
    # 73 GiB would be free without us; eight more were taken while we started, too much for one context
    assert context_nbytes(now, 81 * gib) == CONTEXT_NBYTES
    assert context_nbytes(now, None) == CONTEXT_NBYTES
