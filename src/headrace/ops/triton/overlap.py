"""Kernels that begin while their predecessor in the stream ends (programmatic dependent launch).

A kernel launched with ``launch_pdl=True`` and compiled with ``PDL`` starts once every program of its
predecessor has called ``release`` or has ended. What it reads or writes that others may still write or
read comes after ``wait``, which returns when the predecessor has ended altogether; weights may be read
before, and a batch's lists (contexts, block tables), which are copied to the GPU before a step. Every such
kernel waits before it ends, so that all that came before the predecessor is done, too. To release first, as
sealed decoding in CUDA C++ does, lets the next kernel fetch while this one's last programs run.
In a captured graph this becomes a programmatic edge.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_FROM = (9, 0)  # Hopper
LINE_NBYTES = tl.constexpr(128)  # what ``prefetch`` brings for an address


@triton.jit
def wait(PDL: tl.constexpr):
    """Until the kernel before has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """The next kernel may begin."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_and_release(PDL: tl.constexpr):
    """``wait``; then the next kernel may begin, though it will wait for this one in turn."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Ask the second-level cache for the lines of these addresses, before ``wait``."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


def can_overlap(device: torch.device) -> bool:
    """Whether kernels on ``device`` may be launched so."""
    return device.type == "cuda" and _capability(device) >= _FROM


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
