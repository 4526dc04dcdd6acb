"""Kernels that measure a machine: a plain read, a gather from host memory, a flag to a CPU thread."""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# Kernels are a language of their own; pyright sees Python.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.shared_words import clock_ns


@triton.jit
def read_kernel(source, sums, num_words, WORDS: tl.constexpr):
    """Add up int64 words; the sum of each program is stored, so that no read is left out."""
    total = tl.zeros([WORDS], tl.int64)
    lane = tl.arange(0, WORDS)
    for start in range(tl.program_id(0) * WORDS, num_words, tl.num_programs(0) * WORDS):
        at = start + lane
        total += tl.load(source + at, mask=at < num_words, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def gather_kernel(source, target, num_words, WORDS: tl.constexpr):
    """Copy int64 words from host memory to the GPU's."""
    lane = tl.arange(0, WORDS)
    for start in range(tl.program_id(0) * WORDS, num_words, tl.num_programs(0) * WORDS):
        at = start + lane
        ok = at < num_words
        tl.store(target + at, tl.load(source + at, mask=ok), mask=ok)


@triton.jit
def nothing_kernel(word):
    """The smallest kernel that is not empty."""
    tl.store(word, 1)


@triton.jit
def ping_kernel(seq, ack, count, most_looks):
    """Raise ``seq`` by one and look at ``ack`` until it is equal, at most ``most_looks`` times each."""
    value = tl.load(ack)
    for _ in range(count):
        value += 1
        tl.store(seq, value)
        looks = 0
        seen = tl.load(ack, volatile=True)
        while (seen != value) & (looks < most_looks):
            seen = tl.load(ack, volatile=True)
            looks += 1


@triton.jit(do_not_specialize=["at"])
def stamp_kernel(times, at):
    """Note the GPU's clock, in nanoseconds, in ``times[at]``."""
    tl.store(times + at, clock_ns())
