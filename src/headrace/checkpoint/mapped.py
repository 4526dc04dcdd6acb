"""A file mapped into memory: private, copy on write, no page of it read until somebody looks."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import CheckpointError, DoesNotFitError

# A private writable map counts against the commit limit, and Linux refuses one larger than RAM and
# swap together, although a page costs memory only once it is written. This flag says so
# (mman.h, the same value on x86-64 and arm64; Python's mmap module does not name it everywhere).
_MAP_NORESERVE = 0x4000


class MappedFile:
    """The bytes of a file as one NumPy array of uint8.

    The map is writable, so that torch takes views of it without a warning and a damaged scale can
    be repaired in memory; the file itself never changes.

    Raises:
        CheckpointError: the file cannot be opened or mapped.
        DoesNotFitError: the system does not grant the address space.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                self.raw = _map(file.fileno(), self.nbytes)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise DoesNotFitError(
                    f"{path}: {error.strerror} for a map of its {self.nbytes / 1e6:,.1f} MB",
                    hint="raise the limit on this process's memory (ulimit -v), or free memory",
                ) from error
            raise CheckpointError(
                f"{path}: cannot be read: {error.strerror or error}",
                hint="check that the file exists and that you may read it",
            ) from error
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.raw, dtype=np.uint8)

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """``shape`` elements of ``dtype`` from byte ``offset``, which the caller has checked.

        A view, except where elements do not lie at a multiple of their size (safetensors files
        whose header was not padded): kernels may not read those, so they are copied.
        """
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        flat = self.bytes[offset : offset + nbytes]
        if nbytes == 0:
            return np.empty(shape, kind)
        if offset % kind.itemsize:
            return flat.copy().view(kind).reshape(shape)
        return flat.view(kind).reshape(shape)


def _map(descriptor: int, nbytes: int) -> mmap.mmap | bytearray:
    if nbytes == 0:
        return bytearray()  # an empty file cannot be mapped
    if sys.platform == "linux":
        return mmap.mmap(
            descriptor,
            nbytes,
            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
