"""Kernels for CUDA GPUs: Triton, and cuBLAS (through torch) for products of many rows.

Everything here runs without waiting for the GPU and without copies from the host, so that a decoding
step can be captured in a CUDA graph; what is not (mixtures of many rows) says so. With
``TRITON_INTERPRET=1`` the same kernels run in Triton's interpreter on CPU tensors, for tests.
"""

from __future__ import annotations

from headrace.ops.registry import Op
from headrace.ops.triton.control import available

__all__ = ["OPS", "available"]


def _operations() -> tuple[Op, ...]:
    if available() is not None:
        return ()
    from headrace.ops.triton import table

    return table.OPS


OPS: tuple[Op, ...] = _operations()
