"""The host store: what is in RAM, what is pinned, what lies on disk, and giving it all back."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import psutil
import pytest
import torch

from headrace.core.errors import DoesNotFitError, MachineError
from headrace.experts.random_store import random_store
from headrace.experts.slab import slab_layout
from headrace.experts.slab_load import source_ranges
from headrace.experts.slab_pack import layout_of, layouts_of, read_slab, slice_weights
from headrace.experts.store import HostLimits, HostStore, build_store, limits_of
from headrace.formats.base import PackedTensor, dequantize
from headrace.formats.mxfp4 import quantize as quantize_mxfp4
from headrace.machine.pinned import CudaPinner, cuda_round_trip
from headrace.machine.probe import MemoryInfo
from headrace.ops.records import ExpertWeights

GIB = 1 << 30
PLENTY = HostLimits(ram_nbytes=GIB, pin_nbytes=GIB)


class FakePinner:
    """Pins `allowed` bytes, then refuses like a driver."""

    def __init__(self, allowed: int = GIB) -> None:
        self.allowed = allowed
        self.pinned: dict[int, int] = {}
        self.asked = 0

    def pin(self, address: int, nbytes: int) -> str | None:
        self.asked += 1
        if sum(self.pinned.values()) + nbytes > self.allowed:
            return "cudaHostRegister: out of memory"
        self.pinned[address] = nbytes
        return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def make_layers(count: int = 3, experts: int = 4, seed: int = 0) -> list[ExpertWeights]:
    rng = torch.Generator().manual_seed(seed)

    def matrices(rows: int, cols: int) -> list[PackedTensor]:
        return [quantize_mxfp4(torch.randn(rows, cols, generator=rng)) for _ in range(experts)]

    return [
        ExpertWeights(
            matrices(128, 64),
            matrices(128, 64),
            matrices(64, 128),
            *(torch.randn(experts, n, generator=rng) for n in (128, 128, 64)),
        )
        for _ in range(count)
    ]


def assert_holds(store: HostStore, layers: list[ExpertWeights]) -> None:
    assert store.num_layers == len(layers)
    for i, layer in enumerate(layers):
        for e in range(store.num_experts):
            found = read_slab(store.slab(i, e), store.layout)
            for name in ("gate", "up", "down"):
                want = dequantize(getattr(layer, name)[e])
                assert torch.equal(dequantize(getattr(found, name)[0]), want)
            assert torch.equal(found.down_bias[0], layer.down_bias[e])


def test_every_expert_is_in_its_slab() -> None:
    layers = make_layers()
    layout = layout_of(layers)
    stages: list[tuple[str, float]] = []
    store = build_store(
        layers,
        layouts_of(layers),
        threads=2,
        pin=False,
        limits=PLENTY,
        progress=lambda stage, fraction: stages.append((stage, fraction)),
    )
    assert_holds(store, layers)
    # the addresses are the tensors': slab of expert e at base + e * slab_nbytes
    at = store.tensor(1)[3, 2].data_ptr()
    assert at == store.base(1) + 3 * layout.slab_nbytes + 2 * layout.slice_nbytes
    assert store.base(1) % 4096 == 0
    assert [fraction for _, fraction in stages] == [n / 12 for n in range(1, 13)]
    account = store.account()
    assert account.pageable_nbytes == 12 * layout.slab_nbytes
    assert (account.pinned_nbytes, account.mapped_nbytes) == (0, 0)
    assert store.notes == []  # nobody asked for pinned memory
    assert store.times.nbytes == 12 * layout.slab_nbytes
    assert set(store.times.thread_s) == {"first_touch", "read", "repack"}
    assert "2 threads" in store.times.describe()
    store.close()


def test_pinned_layers_are_unpinned_when_the_store_closes() -> None:
    layers = make_layers()
    pinner = FakePinner()
    store = build_store(
        layers, layouts_of(layers), threads=2, pin=True, limits=PLENTY, pinner=pinner
    )
    assert all(store.pinned(i) for i in range(3))
    assert pinner.pinned == {store.base(i): store.layer_nbytes(i) for i in range(3)}
    view = store.tensor(2)
    store.close()
    store.close()
    assert pinner.pinned == {}
    assert not view.any()


def test_pinned_layers_are_unpinned_when_the_store_is_forgotten() -> None:
    """Memory that is given back while the driver takes it for pinned is no good to the next store there."""
    layers, pinner = make_layers(), FakePinner()
    store = build_store(
        layers, layouts_of(layers), threads=2, pin=True, limits=PLENTY, pinner=pinner
    )
    slab = store.slab(0, 0)
    assert len(pinner.pinned) == 3
    del store
    gc.collect()
    assert pinner.pinned == {}
    assert slab.shape == (layouts_of(layers)[0].num_slices, layouts_of(layers)[0].slice_nbytes)


def test_a_refusal_leaves_the_rest_pageable_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = make_layers(5)
    layout = layout_of(layers)
    pinner = FakePinner(allowed=2 * 4 * layout.slab_nbytes)
    with caplog.at_level(logging.WARNING):
        store = build_store(
            layers, layouts_of(layers), threads=2, pin=True, limits=PLENTY, pinner=pinner
        )
    assert sum(store.pinned(i) for i in range(5)) == 2
    assert pinner.asked == 3  # not once for each layer
    assert_holds(store, layers)
    (note,) = store.notes
    assert "cudaHostRegister: out of memory" in note
    assert "gains nothing from PCIe" in note
    assert [r.message for r in caplog.records] == [note]
    store.close()


def test_b140_the_pin_budget_holds() -> None:
    layers = make_layers(4)
    layout = layout_of(layers)
    pinner = FakePinner()
    limits = HostLimits(GIB, pin_nbytes=3 * 4 * layout.slab_nbytes - 1, reason="75% of it")
    store = build_store(
        layers, layouts_of(layers), threads=1, pin=True, limits=limits, pinner=pinner
    )
    assert (len(pinner.pinned), pinner.asked) == (2, 2)
    assert "75% of it" in store.notes[0]
    store.close()


def test_b016_what_fits_nowhere_is_refused_with_numbers(tmp_path: Path) -> None:
    layout = slab_layout("mxfp4", 2880, 2880, has_bias=True)
    one = make_layers(1, 1)[0]
    layers = [ExpertWeights(one.gate * 128, one.up * 128, one.down * 128)] * 36
    limits = limits_of(MemoryInfo(32 * GIB, 30 * GIB), wsl=False)
    with pytest.raises(
        DoesNotFitError, match=r"61\.3 GB.*36 layers of 1\.70 GB; 31\.1 GB"
    ) as caught:
        build_store(layers, [layout] * 36, threads=1, pin=False, limits=limits)
    assert "--expert-disk" in (caught.value.hint or "")


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers()
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("headrace.experts.slab_file.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DoesNotFitError, match=r"may be used.*and .* has 0\.0 GB free"):
        build_store(
            layers,
            layouts_of(layers),
            threads=1,
            pin=False,
            disk=tmp_path,
            limits=HostLimits(0, 0),
        )
    assert not list(tmp_path.glob("*.slabs"))


def test_disk_tier_holds_what_ram_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers = make_layers()
    layout = layout_of(layers)
    limits = HostLimits(ram_nbytes=2 * 4 * layout.slab_nbytes, pin_nbytes=GIB)
    pinner = FakePinner()

    def build() -> HostStore:
        return build_store(
            layers,
            layouts_of(layers),
            threads=2,
            pin=True,
            disk=tmp_path,
            limits=limits,
            pinner=pinner,
        )

    with caplog.at_level(logging.WARNING):
        store = build()
    assert_holds(store, layers)
    assert [store.pinned(i) for i in range(3)] == [True, True, False]
    assert store.account().mapped_nbytes == 4 * layout.slab_nbytes
    assert any("RAM is short: 1 of 3 layers" in n and "GB/s from RAM" in n for n in store.notes)
    store.close()
    (file,) = tmp_path.glob("*.slabs")
    written = file.stat().st_mtime_ns
    again = build()  # once written, only opened
    assert_holds(again, layers)
    assert file.stat().st_mtime_ns == written
    assert "write" not in again.times.thread_s
    again.close()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", ["bytes", "length", "header"])
def test_a_damaged_slab_file_is_written_anew(tmp_path: Path, damage: str) -> None:
    layers = make_layers()
    layout = layout_of(layers)

    def build() -> HostStore:
        return build_store(
            layers, layouts_of(layers), threads=2, pin=False, disk=tmp_path, limits=HostLimits(0, 0)
        )

    build().close()
    (file,) = tmp_path.glob("*.slabs")
    data = bytearray(file.read_bytes())
    if damage == "bytes":
        data[-3 * 4 * layout.slab_nbytes + 100] ^= 1  # in the first slab
    elif damage == "length":
        del data[-1:]
    else:
        data[20] ^= 0x80
    file.write_bytes(bytes(data))
    store = build()
    assert_holds(store, layers)
    assert "write" in store.times.thread_s
    store.close()


def test_other_weights_get_a_file_of_their_own(tmp_path: Path) -> None:
    for seed in (1, 2):
        layers = make_layers(seed=seed)
        store = build_store(
            layers,
            layouts_of(layers),
            threads=1,
            pin=False,
            disk=tmp_path,
            limits=HostLimits(0, 0),
        )
        assert_holds(store, layers)
        store.close()
    assert len(list(tmp_path.glob("*.slabs"))) == 2


def test_a_failing_thread_stops_the_load_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = make_layers()
    pinner = FakePinner()

    def fail(*args: object) -> None:
        raise MachineError("the disk is gone")

    monkeypatch.setattr("headrace.experts.slab_load.write_slab", fail)
    with pytest.raises(MachineError, match="the disk is gone"):
        build_store(layers, layouts_of(layers), threads=2, pin=True, limits=PLENTY, pinner=pinner)
    assert pinner.pinned == {}


def test_b139_the_self_test_reads_every_pinned_layer() -> None:
    layers = make_layers()
    store = build_store(
        layers, layouts_of(layers), threads=1, pin=True, limits=PLENTY, pinner=FakePinner()
    )
    assert store.check_copies(torch.clone) == 3 * store.layout.slice_nbytes
    with pytest.raises(MachineError, match="came back changed"):
        store.check_copies(torch.zeros_like)
    store.close()


def test_limits_leave_a_reserve_and_take_what_was_asked_for() -> None:
    memory = MemoryInfo(64 * GIB, 60 * GIB)
    assert limits_of(memory, wsl=False).ram_nbytes == 59 * GIB
    assert limits_of(memory, wsl=False, ram_nbytes=62 * GIB).ram_nbytes == 62 * GIB
    assert limits_of(memory, wsl=False, pin_nbytes=GIB).pin_nbytes == GIB


def test_interleaved_gate_and_up_are_read_once() -> None:
    both = torch.zeros(256, 4096, dtype=torch.uint8)
    gate = PackedTensor("fp8_e4m3", (128, 4096), {"codes": both[0::2]})
    up = PackedTensor("fp8_e4m3", (128, 4096), {"codes": both[1::2]})
    apart = torch.zeros(64, 4096, dtype=torch.uint8)
    down = PackedTensor("fp8_e4m3", (64, 4096), {"codes": apart, "scale": torch.tensor(1.0)})
    ranges = source_ranges(ExpertWeights([gate], [up], [down]), 0)
    want = sorted([(both.data_ptr(), 256 * 4096), (apart.data_ptr(), 64 * 4096)])
    assert ranges == want or ranges == [(want[0][0], want[1][0] + want[1][1] - want[0][0])]


FORMATS_OFFERED = ("mxfp4", "nvfp4", "fp8_e4m3", "bf16", "f16", "f32", "q8_0", "q4_k", "q6_k")


@pytest.mark.parametrize("fmt", FORMATS_OFFERED)
def test_random_experts_are_valid(fmt: str) -> None:
    layout = slab_layout(fmt, 256, 512, has_bias=True)
    store = random_store(layout, 2, 3, seed=1, threads=2)
    sizes: list[float] = []
    for layer, expert in ((0, 0), (1, 2)):
        for s in range(layout.num_slices):
            piece = slice_weights(store.slab(layer, expert), layout, s)
            for matrix in (piece.gate[0], piece.up[0], piece.down[0]):
                values = dequantize(matrix)
                assert values.isfinite().all()
                sizes.append(float(values.square().mean().sqrt()))
            assert piece.gate_bias.abs().max() <= 2**-5
            assert bool(piece.down_bias.any()) == (s == 0)
    assert min(sizes) > 2**-10
    assert max(sizes) < 2**-3
    assert not torch.equal(store.slab(0, 0), store.slab(0, 1))
    store.close()


def test_random_experts_depend_on_the_seed_alone() -> None:
    layout = slab_layout("mxfp4", 64, 128, has_bias=True)
    a, b, c = (
        random_store(layout, 2, 2, seed=seed, threads=threads)
        for seed, threads in ((5, 1), (5, 3), (6, 1))
    )
    assert torch.equal(a.tensor(1), b.tensor(1))
    assert not torch.equal(a.tensor(1), c.tensor(1))
    scales = slice_weights(a.slab(0, 0), layout, 0).gate[0].parts["scales"]
    assert int(scales.min()) >= 118
    assert int(scales.max()) <= 121


def test_closing_gives_the_memory_back() -> None:
    store = random_store(slab_layout("mxfp4", 1024, 1024, has_bias=True), 4, 8, seed=1, threads=2)
    tensors = [store.tensor(i) for i in range(4)]
    before = psutil.Process().memory_info().rss
    store.close()
    assert psutil.Process().memory_info().rss < before - 4 * store.layer_nbytes(0) // 2
    assert len(tensors) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_store_on_the_gpu() -> None:
    layers = make_layers()
    store = build_store(layers, layouts_of(layers), threads=2, pin=True, limits=PLENTY)
    assert store.tensor(0).is_pinned()
    assert isinstance(store._pinner, CudaPinner)
    assert store.check_copies(cuda_round_trip) > 0
    assert_holds(store, layers)
    store.close()
    assert torch.ones(2, device="cuda").sum().item() == 2
