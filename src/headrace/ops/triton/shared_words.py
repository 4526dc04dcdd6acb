"""Words that a kernel shares with the host and with kernels beside it, and the clock."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def fence_system():
    """Order this thread's memory operations before its later ones for the whole system."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def clock_ns():
    """The GPU's clock in nanoseconds, int64; 0 in the interpreter."""
    if INTERPRETED:
        return tl.zeros((), tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def seen_by_all(word, THREADS: tl.constexpr):
    """What lies at ``word`` now, the same for all THREADS of a program: threads that read for themselves
    what another kernel is writing might disagree, and go different ways."""
    return tl.max(tl.load(word + tl.zeros([THREADS], tl.int32), volatile=True), 0)


@triton.jit
def host_word(word, THREADS: tl.constexpr):
    """What lies at a word of pinned host memory now, the same for all THREADS of a program. One thread reads:
    a volatile load of all of them would be as many reads over PCIe."""
    thread = tl.arange(0, THREADS)
    own = tl.load(word + thread * 0, mask=thread == 0, other=LOWEST, volatile=True)
    return tl.max(own, 0)
