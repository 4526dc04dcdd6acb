"""Pages of host memory: large anonymous blocks, and advice to the kernel about them.

Advice is advice: where a system does not know it nothing happens but the slower way.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import DoesNotFitError

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20  # x86-64's and arm64's (4 KiB granule) second page size

# asm-generic/mman-common.h; Python's mmap module names the last two on no version yet.
_MADV_WILLNEED = 3
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23


class HostBlock:
    """``nbytes`` of private anonymous memory, at a multiple of a huge page, zero until written.

    No page of it exists before it is touched. Views may outlive ``release``: they read zeros.

    Raises:
        DoesNotFitError: the system does not give that much address space.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._map = _anonymous(nbytes + HUGE_PAGE_NBYTES)
        except (OSError, ValueError, OverflowError) as error:
            raise DoesNotFitError(
                f"the system refuses {nbytes / 1e9:.1f} GB of memory: {error}",
                hint="close other programs, or lower --ram-budget",
            ) from None
        whole = np.frombuffer(self._map, dtype=np.uint8)
        start = -address_of(whole) % HUGE_PAGE_NBYTES
        self.bytes: npt.NDArray[np.uint8] = whole[start : start + nbytes]
        self.address = address_of(self.bytes)
        self.huge = _advise(self.address, nbytes, _MADV_HUGEPAGE)

    def release(self) -> None:
        """Give the pages back at once, whoever still holds a view."""
        if not drop(self.address, self.nbytes):
            self.bytes = self.bytes[:0]  # then the memory goes with the last view


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the first byte of an array lies."""
    return int(array.__array_interface__["data"][0])


def touch_for_writing(address: int, nbytes: int) -> None:
    """Make the pages of a new block exist. Its bytes must still be zero, or be about to be written."""
    if not _advise(*_whole_pages(address, nbytes), _MADV_POPULATE_WRITE):
        bytes_at(address, nbytes)[::PAGE_NBYTES] = 0


def will_need(address: int, nbytes: int) -> None:
    """Have a mapped file's range read in the background."""
    _advise(*_whole_pages(address, nbytes), _MADV_WILLNEED)


def touch_for_reading(address: int, nbytes: int) -> None:
    """Bring the pages of a mapped file into memory."""
    pages = _whole_pages(address, nbytes)
    if not _advise(*pages, _MADV_POPULATE_READ):
        bytes_at(address, nbytes)[::PAGE_NBYTES].max(initial=0)


def drop(address: int, nbytes: int) -> bool:
    """Give pages back: anonymous ones read as zeros after it, a file's unchanged ones come back."""
    return _advise(address, nbytes, _MADV_DONTNEED)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that somebody else keeps alive, as an array."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(memory), dtype=np.uint8)


def huge_nbytes(block: HostBlock) -> int | None:
    """How much of a block really lies in huge pages; None where nobody says (not on Linux)."""
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            inside, found = False, 0
            for line in lines:
                head = line.split(None, 1)[0]
                if "-" in head and not head.endswith(":"):
                    first, last = (int(x, 16) for x in head.split("-"))
                    inside = first < block.address + block.nbytes and block.address < last
                elif inside and head == "AnonHugePages:":
                    found += int(line.split()[1]) * 1024
            return found
    except OSError:
        return None


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """The whole pages that hold a range: address and bytes."""
    start = address // PAGE_NBYTES * PAGE_NBYTES
    end = -(-(address + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
    return start, end - start


def _anonymous(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    # Shared anonymous memory, Python's default, gets no huge pages on most systems.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@cache
def _madvise() -> Any:
    """The C library's function, which Python's own does not replace: that one keeps the lock."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the kernel took the advice."""
    function = _madvise()
    return function is not None and nbytes > 0 and function(address, nbytes, advice) == 0
