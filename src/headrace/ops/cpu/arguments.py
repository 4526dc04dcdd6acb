"""Checks of activation tensors; each costs well under a microsecond, since decoding calls often."""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError


def rows_of(x: torch.Tensor, cols: int, name: str) -> torch.Tensor:
    """``x`` as contiguous float32 rows of ``cols``."""
    if x.dtype is not torch.float32 or x.shape[-1] != cols or not x.is_cpu:
        raise InternalError(
            f"{name}: found {x.dtype} {list(x.shape)} on {x.device}, "
            f"expected float32 [rows, {cols}] on the CPU"
        )
    return x if x.is_contiguous() else x.contiguous()


def checked(x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """``x``, contiguous, once it has ``dtype`` and ``shape``."""
    if x.dtype is not dtype or x.shape != shape or not x.is_cpu:
        raise InternalError(
            f"{name}: found {x.dtype} {list(x.shape)} on {x.device}, "
            f"expected {dtype} {list(shape)} on the CPU"
        )
    return x if x.is_contiguous() else x.contiguous()


def address(x: torch.Tensor | None, size: int, name: str) -> int:
    """The address of a float32 vector of ``size`` elements, 0 for None."""
    if x is None:
        return 0
    if x.dtype is not torch.float32 or x.numel() != size or not x.is_contiguous():
        raise InternalError(
            f"{name}: found {x.dtype} {list(x.shape)}, expected {size} contiguous float32"
        )
    return x.data_ptr()


def in_range(bad: int, values: torch.Tensor, limit: str, name: str) -> None:
    """Raise if a kernel returned the index of a value out of range."""
    if bad >= 0:
        raise InternalError(
            f"{name}[{bad}]: found {values.reshape(-1)[bad].item()}, expected {limit}"
        )
