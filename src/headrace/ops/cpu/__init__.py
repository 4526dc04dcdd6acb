"""The C++ kernels: float32 activations times weights in their stored format, on any CPU.

``HEADRACE_ISA`` (``scalar``, ``avx2`` or ``avx512``) forces one instruction set; without it the best
that the CPU supports is taken. All of them give the same bits: sums run in sixteen lanes, in one
order, whatever the instruction set, the number of rows and the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.cpu.control import available, num_threads, set_num_threads

if TYPE_CHECKING:
    from headrace.ops.registry import Op

__all__ = ["OPS", "available", "num_threads", "set_num_threads"]

OPS: tuple[Op, ...] = ()

if available() is None:
    from headrace.ops.cpu.table import OPS as _OPS

    OPS = _OPS
