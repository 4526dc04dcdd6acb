"""Whether Triton kernels can run here."""

from __future__ import annotations

import importlib.util
import os

import torch

# Triton's kernels here use tensor cores for bfloat16, which Ampere brought.
MIN_CAPABILITY = (8, 0)


def available() -> str | None:
    """Return None if the kernels can run here, else why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'headrace[cuda]')"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "no CUDA device: torch.cuda.is_available() is false"
    found = torch.cuda.get_device_capability()
    if found < MIN_CAPABILITY:
        return f"compute capability {found[0]}.{found[1]}, expected at least 8.0"
    return None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unpack_instructions(capability: tuple[int, int] | None = None) -> int:
    """``UNPACK`` of ``headrace.ops.triton.lowbit``; ``capability``: of the current device if None."""
    if capability is None:
        if interpreted():
            return 0
        capability = torch.cuda.get_device_capability()
    return 1 if capability >= (8, 9) else 2
