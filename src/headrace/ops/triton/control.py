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


def unpack_instructions() -> int:
    """``UNPACK`` of ``headrace.ops.triton.lowbit`` for the current device."""
    if interpreted() or torch.cuda.get_device_capability() < (9, 0):
        return 0
    return 1
