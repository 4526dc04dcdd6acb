"""All experts of a model in host memory, as slabs: what GPU slots are filled from and the CPU computes on.

A layer's slabs are one block of memory, pinned if the host allows it. Layers that neither RAM nor its
budget can hold are mapped from a slab file (``store_file``), and the page cache is the third tier.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import DoesNotFitError
from headrace.core.words import counted
from headrace.experts.model_layout import mean_slice_nbytes, widest
from headrace.experts.slab import SlabLayout
from headrace.experts.slab_file import SlabFile, fingerprint, open_or_write
from headrace.experts.slab_load import Loader, LoadTimes
from headrace.machine.cgroup import read_cgroup
from headrace.machine.pages import HostBlock
from headrace.machine.pinned import NoPinner, Pinner, default_pinner, pin_budget, verify_copies
from headrace.machine.probe import MemoryInfo, is_wsl, read_memory
from headrace.ops.records import ExpertWeights

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
# Left to other programs and to our own small allocations when nobody gives a budget: as much as the
# engine's memory plan reserves for its processes, twice.
RESERVE_NBYTES = 1 << 30


@dataclass(frozen=True)
class HostLimits:
    """How much host memory slabs may take, and how much of it may be pinned."""

    ram_nbytes: int
    pin_nbytes: int
    reason: str = "as asked for"


def host_limits(*, ram_nbytes: int | None = None, pin_nbytes: int | None = None) -> HostLimits:
    """Limits of this machine now; what the user asked for is taken as it is."""
    memory = read_memory(Path("/"), read_cgroup())
    return limits_of(memory, wsl=is_wsl(Path("/")), ram_nbytes=ram_nbytes, pin_nbytes=pin_nbytes)


def limits_of(
    memory: MemoryInfo, *, wsl: bool, ram_nbytes: int | None = None, pin_nbytes: int | None = None
) -> HostLimits:
    """Limits of a machine with this memory."""
    pin = pin_budget(memory, wsl=wsl, requested=pin_nbytes)
    available = memory.usable_available_nbytes
    ram = max(0, available - RESERVE_NBYTES) if ram_nbytes is None else ram_nbytes
    return HostLimits(
        ram, pin.nbytes, f"{available / 1e9:.1f} GB of RAM available; pinned: {pin.reason}"
    )


class Memory(Protocol):
    """The slabs of one layer: where they lie, and giving them back."""

    address: int
    bytes: npt.NDArray[np.uint8]

    def release(self) -> None: ...


@dataclass
class _Layer:
    """unpin: also done when the memory is collected without ``HostStore.close``. A driver that goes on
    taking the range for pinned refuses the next one there, and copies the pages that lay there before."""

    memory: Memory
    tensor: torch.Tensor
    unpin: weakref.finalize[[int], Memory] | None = None
    mapped: bool = False

    @property
    def pinned(self) -> bool:
        return self.unpin is not None and self.unpin.alive


@dataclass(frozen=True)
class StoreAccount:
    """Bytes of expert weights by where they lie."""

    pinned_nbytes: int
    pageable_nbytes: int
    mapped_nbytes: int  # from a file: in the page cache, as far as that goes


class HostStore:
    """The slabs of every layer. Make it with ``build_store`` or ``random_store``.

    ``layouts``: of each layer's slabs. They are cut alike, and may differ in formats and so in bytes:
    ``layout`` is the one with the longest slices, which slots are made for.
    ``notes``: sentences that the user should read once (what is not pinned, what lies on disk).
    """

    def __init__(
        self,
        layouts: Sequence[SlabLayout],
        num_experts: int,
        pinner: Pinner | None = None,
    ) -> None:
        """layouts: of each layer that will be added."""
        self.layouts = tuple(layouts)
        self.layout = widest(layouts)
        self.num_experts = num_experts
        self.times = LoadTimes()
        self.notes: list[str] = []
        self._pinner: Pinner = pinner or NoPinner("it was not asked for")
        self._layers: list[_Layer] = []
        self._closed = False

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def mean_slice_nbytes(self) -> int:
        """Bytes of a slice over all layers, for rates and counts that do not tell layers apart."""
        return mean_slice_nbytes(self.layouts)

    def layer_nbytes(self, layer: int) -> int:
        """Bytes of a layer's slabs."""
        return self.num_experts * self.layouts[layer].slab_nbytes

    def base(self, layer: int) -> int:
        """The address of the layer's first slab; of expert e at + e * layouts[layer].slab_nbytes."""
        return self._layers[layer].memory.address

    def tensor(self, layer: int) -> torch.Tensor:
        """The layer's slabs, uint8 [num_experts, num_slices, slice_nbytes], the same memory."""
        return self._layers[layer].tensor

    def slab(self, layer: int, expert: int) -> torch.Tensor:
        """One slab, uint8 [num_slices, slice_nbytes]."""
        return self._layers[layer].tensor[expert]

    def pinned(self, layer: int) -> bool:
        """Whether GPUs may read the layer. If not, only the CPU computes on it."""
        return self._layers[layer].pinned

    def account(self) -> StoreAccount:
        """Where the bytes lie."""

        def total(wanted: Callable[[_Layer], bool]) -> int:
            return sum(self.layer_nbytes(i) for i, x in enumerate(self._layers) if wanted(x))

        return StoreAccount(
            pinned_nbytes=total(lambda x: x.pinned),
            pageable_nbytes=total(lambda x: not x.pinned and not x.mapped),
            mapped_nbytes=total(lambda x: x.mapped),
        )

    def add(self, memory: Memory, *, mapped: bool = False) -> None:
        """Append a layer."""
        layout = self.layouts[len(self._layers)]
        shape = (self.num_experts, layout.num_slices, layout.slice_nbytes)
        flat = torch.from_numpy(memory.bytes)  # pyright: ignore[reportUnknownMemberType]
        tensor = flat.view(shape)
        self._layers.append(_Layer(memory, tensor, mapped=mapped))

    def pin(self, layer: int) -> str | None:
        """Pin a layer; None if that worked, else why not."""
        at = self._layers[layer]
        refusal = self._pinner.pin(at.memory.address, self.layer_nbytes(layer))
        if refusal is None:
            at.unpin = weakref.finalize(at.memory, self._pinner.unpin, at.memory.address)
            at.unpin.atexit = False  # the driver may have gone before
        return refusal

    def check_copies(self, there_and_back: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Copy one slice of each pinned layer to the GPU and back; see ``verify_copies``."""
        samples = [
            layer.tensor[i % self.num_experts, 0]
            for i, layer in enumerate(self._layers)
            if layer.pinned
        ]
        return verify_copies(samples, there_and_back)

    def close(self) -> None:
        """Unpin and give the memory back. Views that live on read zeros."""
        if self._closed:
            return
        self._closed = True
        for layer in self._layers:
            if layer.unpin is not None:
                layer.unpin()
            layer.memory.release()


def build_store(
    layers: Sequence[ExpertWeights],
    layouts: Sequence[SlabLayout],
    *,
    threads: int,
    pin: bool,
    disk: Path | None = None,
    progress: Progress | None = None,
    limits: HostLimits | None = None,
    pinner: Pinner | None = None,
) -> HostStore:
    """Repack the experts of every layer into slabs.

    Args:
        layers: as the checkpoint stores them; all with the same number of experts.
        layouts: of each layer (``slab_pack.layouts_of``).
        threads: that read and copy at once.
        pin: let a GPU read them, as far as the host allows it.
        disk: a folder for a slab file, used only if RAM is short.
        progress: called with a stage and a fraction from 0 to 1, on the calling thread.
        limits: what may be used; this machine's if None.
        pinner: how memory is pinned; CUDA's if None.

    Raises:
        DoesNotFitError: neither RAM nor the folder has room.
    """
    limits = limits or host_limits()
    pinner = (pinner or default_pinner()) if pin else None
    store = HostStore(layouts, len(layers[0].gate), pinner)
    loader = Loader(layouts, threads, progress)
    ends = itertools.accumulate(store.layer_nbytes(layer) for layer in range(len(layers)))
    in_ram = sum(end <= limits.ram_nbytes for end in ends)
    file: SlabFile | None = None
    try:
        if in_ram < len(layers):
            file = _slab_file(layers, store, loader, disk, limits)
        for layer in range(len(layers)):
            if layer < in_ram:
                store.add(HostBlock(store.layer_nbytes(layer)))
            elif file is not None:
                store.add(file.layer(layer), mapped=True)
        tensors = [store.tensor(i) for i in range(in_ram)]
        if file is not None:
            loader.copy([file.layer(i).bytes for i in range(in_ram)], tensors)
        else:
            loader.repack(layers, tensors)
        refusal = _pin(store, in_ram, limits, loader) if pin else None
        store.times = loader.finish()
        _say(store, refusal, file, in_ram)
    except BaseException:
        store.close()
        raise
    return store


def _pin(store: HostStore, count: int, limits: HostLimits, loader: Loader) -> str | None:
    """Pin layers until the budget ends or the host refuses; why it ended before the last, if it did.

    After loading, not beside it: 18 layers took 0.9 s once their pages were there, and 10.9 s while
    other threads made pages (H200 machine, 2026-11-29).
    """
    pinned = 0
    for layer in range(count):
        pinned += store.layer_nbytes(layer)
        if pinned > limits.pin_nbytes:
            return f"the limit is {limits.pin_nbytes / 1e9:.1f} GB ({limits.reason})"
        with loader.times.timing("pin"):
            refusal = store.pin(layer)
        if refusal is not None:
            return refusal
        loader.report("pinning experts", (layer + 1) / count)
    return None


def _slab_file(
    layers: Sequence[ExpertWeights],
    store: HostStore,
    loader: Loader,
    disk: Path | None,
    limits: HostLimits,
) -> SlabFile:
    sizes = [store.layer_nbytes(layer) for layer in range(len(layers))]
    need = sum(sizes)
    short = (
        f"the experts need {need / 1e9:.1f} GB as slabs, {counted(len(layers), 'layer')} of "
        f"{need / len(layers) / 1e9:.2f} GB; {limits.ram_nbytes / 1e9:.1f} GB of RAM may be used "
        f"({limits.reason})"
    )
    if disk is None:
        raise DoesNotFitError(
            short,
            hint="give a folder on a fast disk for them (--expert-disk), a larger --ram-budget, or "
            "a smaller quantisation",
        )
    return open_or_write(disk, fingerprint(layers), layers, loader, short)


def _say(store: HostStore, refusal: str | None, file: SlabFile | None, in_ram: int) -> None:
    """Say once what is slower than it could be, and by how much."""
    account = store.account()
    total = sum(store.layer_nbytes(layer) for layer in range(store.num_layers))
    if refusal is not None and account.pageable_nbytes:
        store.notes.append(
            f"{account.pageable_nbytes / 1e9:.1f} of {total / 1e9:.1f} GB of experts are not pinned: "
            f"{refusal}. The GPU does not fetch them; the CPU alone computes on them, so a miss "
            "there gains nothing from PCIe"
        )
    if file is not None:
        store.notes.append(
            f"RAM is short: {store.num_layers - in_ram} of {counted(store.num_layers, 'layer')} of experts "
            f"({account.mapped_nbytes / 1e9:.1f} GB) are read from {file.path}, at "
            f"{file.read_gbps():.1f} GB/s where the page cache does not hold them, against "
            f"{file.memory_gbps():.0f} GB/s from RAM"
        )
    for note in store.notes:
        log.warning("%s", note)
