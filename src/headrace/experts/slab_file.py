"""Slabs in a file, mapped: the tier below RAM.

::

    bytes 0-7     "HRSLABS2"
    8-15          little-endian length of the header
    16 ...        the header, JSON: identity of the weights, layouts, counts, a CRC-32 of each slab
    data_offset   slab of (layer 0, expert 0), (0, 1), ...; a multiple of the page size

A file is written once, under another name until it is whole. Opening checks the header, the size and
one slab of each layer; what does not fit is written anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.mapped import MappedFile
from headrace.core.errors import CheckpointError, DoesNotFitError
from headrace.core.words import counted
from headrace.experts.slab import SLICE_ALIGNMENT, SlabLayout
from headrace.experts.slab_load import Loader
from headrace.machine.dram_probe import dram_read_gbps
from headrace.machine.pages import address_of, drop
from headrace.ops.records import ExpertWeights

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
MAGIC = b"HRSLABS2"
_SAMPLE_NBYTES = 4096  # of each matrix, for the identity
_PROBE_NBYTES = 256 << 20  # read from the disk to say how fast it is: a tenth of a second on NVMe
_PROBE_PIECE_NBYTES = 4 << 20
_PROBE_THREADS = 4


class MappedLayer:
    """One layer's slabs in a slab file."""

    def __init__(self, data: Bytes) -> None:
        self.bytes = data
        self.address = address_of(data)

    def release(self) -> None:
        drop(self.address, self.bytes.size)


class SlabFile:
    """An opened and checked slab file.

    Raises:
        CheckpointError: it is not a slab file, is cut short or damaged, or holds other weights.
    """

    def __init__(
        self, path: Path, identity: str, layouts: Sequence[SlabLayout], num_experts: int
    ) -> None:
        self.path = path
        self._file = MappedFile(path)
        header = _read_header(self._file)
        want = _header(identity, layouts, num_experts)
        for key, value in want.items():
            if header.get(key) != value:
                raise CheckpointError(f"{path}: {key} is {header.get(key)!r}, expected {value!r}")
        offset = int(header["data_offset"])
        self._starts = [offset + at for at in _layer_starts(layouts, num_experts)]
        end = self._starts[-1]
        if self._file.nbytes != end:
            raise CheckpointError(f"{path}: {counted(self._file.nbytes, 'byte')}, expected {end}")
        sums: list[int] = header["crc32"]
        for layer, layout in enumerate(layouts):
            expert = layer % num_experts  # another one in each layer: damage comes in runs
            slab = self.layer(layer).bytes[expert * layout.slab_nbytes :][: layout.slab_nbytes]
            if zlib.crc32(slab.data) != sums[layer * num_experts + expert]:
                raise CheckpointError(
                    f"{path}: the slab of layer {layer}, expert {expert} is damaged"
                )

    def layer(self, index: int) -> MappedLayer:
        """The slabs of one layer."""
        return MappedLayer(self._file.bytes[self._starts[index] : self._starts[index + 1]])

    def read_gbps(self) -> float:
        """How fast the disk is: a part of the file, dropped from the page cache first."""
        nbytes = min(_PROBE_NBYTES, self._file.nbytes)
        first = (self._file.nbytes - nbytes) // 2 // SLICE_ALIGNMENT * SLICE_ALIGNMENT
        with self.path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            if hasattr(os, "posix_fadvise"):
                drop(address_of(self._file.bytes) + first, nbytes)
                os.posix_fadvise(descriptor, first, nbytes, os.POSIX_FADV_DONTNEED)

            def read(offset: int) -> int:
                return _read_at(file, offset, _PROBE_PIECE_NBYTES)

            offsets = range(first, first + nbytes, _PROBE_PIECE_NBYTES)
            start = time.perf_counter()
            with ThreadPoolExecutor(_PROBE_THREADS) as pool:
                got = sum(pool.map(read, offsets))
            return got / (time.perf_counter() - start) / 1e9

    def memory_gbps(self) -> float:
        """How fast RAM is with as many threads."""
        return dram_read_gbps(_PROBE_THREADS)


def fingerprint(layers: Sequence[ExpertWeights]) -> str:
    """An identity of weights: formats, shapes, biases, and a sample of every matrix.

    The sample moves from expert to expert, so that a matrix' whole height is looked at.
    """
    digest = hashlib.sha256()
    for layer in layers:
        for e in range(len(layer.gate)):
            for matrix in (layer.gate[e], layer.up[e], layer.down[e]):
                digest.update(f"{matrix.format} {list(matrix.shape)};".encode())
                for name, part in sorted(matrix.parts.items()):
                    digest.update(name.encode())
                    digest.update(_sample(part, e, len(layer.gate)))
        for bias in (layer.gate_bias, layer.up_bias, layer.down_bias):
            if bias is not None:
                digest.update(np.ascontiguousarray(bias.numpy()).data)
    return digest.hexdigest()


def open_or_write(
    folder: Path,
    identity: str,
    layers: Sequence[ExpertWeights],
    loader: Loader,
    why: str,
) -> SlabFile:
    """Open the slab file of these weights, writing it first if it is not there or damaged.

    Args:
        why: a sentence for the error, should the folder have no room.

    Raises:
        DoesNotFitError: the disk is too small.
    """
    path = folder / f"{identity[:32]}.slabs"
    layouts, num_experts = loader.layouts, len(layers[0].gate)
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(path.with_suffix(".lock")):
        if path.exists():
            try:
                return SlabFile(path, identity, layouts, num_experts)
            except CheckpointError as error:
                log.warning("the slab file is written anew: %s", error.message)
                path.unlink()
        _require_room(folder, _layer_starts(layouts, num_experts)[-1], why)
        _write(path, identity, layers, loader)
        return SlabFile(path, identity, layouts, num_experts)


def _write(path: Path, identity: str, layers: Sequence[ExpertWeights], loader: Loader) -> None:
    layouts, num_experts = loader.layouts, len(layers[0].gate)
    starts, sums = _layer_starts(layouts, num_experts), [0] * (len(layers) * num_experts)
    # The sums are not known yet: leave room for their longest spelling.
    room = _encode(
        _header(identity, layouts, num_experts)
        | {"data_offset": 1 << 40, "crc32": [1 << 32] * len(sums)}
    )
    offset = -(-len(room) // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
    partial = path.with_suffix(".partial")  # one writer at a time: left over from a crash, if there
    try:
        with partial.open("wb", buffering=0) as file:
            write_at = _writer(file)

            def sink(layer: int, expert: int, slab: Bytes) -> None:
                sums[layer * num_experts + expert] = zlib.crc32(slab.data)
                write_at(slab.data, offset + starts[layer] + expert * layouts[layer].slab_nbytes)

            loader.write(layers, sink)
            write_at(
                memoryview(
                    _encode(
                        _header(identity, layouts, num_experts)
                        | {"data_offset": offset, "crc32": sums}
                    )
                ),
                0,
            )
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _layer_starts(layouts: Sequence[SlabLayout], num_experts: int) -> list[int]:
    """Where the slabs of each layer begin, and where the last one's end."""
    return [0, *itertools.accumulate(num_experts * layout.slab_nbytes for layout in layouts)]


def _header(identity: str, layouts: Sequence[SlabLayout], num_experts: int) -> dict[str, Any]:
    """``layouts``: each once; ``layout_of``: by layer, which of them."""
    distinct = list(dict.fromkeys(layouts))
    described = json.loads(json.dumps([dataclasses.asdict(layout) for layout in distinct]))
    return {
        "identity": identity,
        "layouts": described,
        "layout_of": [distinct.index(layout) for layout in layouts],
        "experts": num_experts,
    }


def _encode(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text


def _read_header(file: MappedFile) -> dict[str, Any]:
    start = bytes(file.bytes[:16])
    length = int.from_bytes(start[8:], "little")
    if start[:8] != MAGIC or length > file.nbytes - 16:
        raise CheckpointError(f"{file.path}: not a slab file")
    try:
        header: dict[str, Any] = json.loads(bytes(file.bytes[16 : 16 + length]))
        return header
    except ValueError:
        raise CheckpointError(f"{file.path}: the header is damaged") from None


def _sample(part: torch.Tensor, index: int, count: int) -> bytes:
    """Some bytes of a part, from a place that depends on the expert."""
    if part.ndim < 2:
        return np.ascontiguousarray(part.numpy()).tobytes()
    rows = part.shape[0]
    row_nbytes = part.shape[1] * part.element_size()
    wanted = min(rows, -(-_SAMPLE_NBYTES // max(1, row_nbytes)))
    first = (rows - wanted) * index // max(1, count - 1)
    return np.ascontiguousarray(part[first : first + wanted].view(torch.uint8).numpy()).tobytes()


def _require_room(folder: Path, nbytes: int, why: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise DoesNotFitError(
            f"{why}, and {folder} has {free / 1e9:.1f} GB free for a slab file of {nbytes / 1e9:.1f} GB",
            hint="make room there, or name a folder on another disk (--expert-disk)",
        )


def _read_at(file: BinaryIO, offset: int, nbytes: int) -> int:
    if hasattr(os, "pread"):
        return len(os.pread(file.fileno(), nbytes, offset))
    with open(file.name, "rb", buffering=0) as own:
        own.seek(offset)
        return len(own.read(nbytes))


def _writer(file: BinaryIO) -> Callable[[memoryview, int], None]:
    """A function that writes all bytes at an offset, from any thread."""
    lock = threading.Lock()

    def piece(data: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(file.fileno(), data, offset)
        with lock:
            file.seek(offset)
            return file.write(data)

    def write(data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += piece(data[done:], offset + done)

    return write


@contextmanager
def _turn(path: Path) -> Generator[None, None, None]:
    """One process at a time; where the system has no such locks, a second one writes as well."""
    with path.open("wb") as file:
        try:
            import fcntl
        except ImportError:
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
