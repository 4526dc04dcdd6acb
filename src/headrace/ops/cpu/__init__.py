"""The C++ kernels: float32 activations times weights in their stored format, on any CPU.

``HEADRACE_ISA`` (``scalar``, ``avx2``, ``avx512``, ``avx512_amx`` or ``avx512_vnni``) forces one
instruction set; without it the best of the first four that the CPU supports is taken. Those give the
same bits in calls of up to 64 rows: sums run in sixteen lanes, in one order, whatever the instruction
set, the number of rows and the number of threads. Larger calls run on matrix tiles where there are
some (``avx512_amx``), with two bfloat16 terms per activation: ``docs/adr/0008-matrix-tiles.md``.
``avx512_vnni`` computes with two int8 terms per activation.
"""

from __future__ import annotations

from headrace.ops.cpu.control import available, isa, num_threads, set_num_threads, why_no_tiles
from headrace.ops.registry import Op

__all__ = ["OPS", "available", "isa", "num_threads", "set_num_threads", "why_no_tiles"]


def _operations() -> tuple[Op, ...]:
    if available() is not None:
        return ()
    from headrace.ops.cpu import table

    return table.OPS


OPS: tuple[Op, ...] = _operations()
