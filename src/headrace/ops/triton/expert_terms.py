"""Rows of GGUF blocks times an activation in integers: ``dp4a`` of codes and two int8 terms.

Codes of four bits leave a Hopper SM about 3.6 thread-instructions a weight at its memory's rate, of which
integer products count double. To float32, a weight is six or more: mask, shift, convert, multiply, and
its share of a scale. In integers it is about two: one mask for four weights and one ``dp4a`` for four
with each term. Activations are x = unit * (256 high + low) by blocks of 32, 15 bits of the block's largest
value: the same arithmetic as the CPU's kernels.

An activation row in that form (*terms*), int32 words: K / 4 of high terms, four values a word; K / 4 of
low ones; K / 16 sums of sixteen integers, which offsets multiply; float32 bits of K / 32 units, and of
K / 32 sums of thirty-two values, which minima multiply.

Here is how terms are made; ``expert_term_rows`` multiplies with them.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_rows import LARGEST

# Columns that a step takes of each format; a matrix's rows are whole steps, except that Q8_0 may end early.
STEPS = {"q4_k": 256, "q5_k": 256, "q6_k": 256, "q8_0": 128, "q4_0": 256}


def term_words(columns: int) -> int:
    """int32 words of one row's terms."""
    return columns // 2 + columns // 16 + columns // 16


def has_terms(fmt: str, columns: int) -> bool:
    """Whether matrices of this format and width have integer products here."""
    return fmt in STEPS and columns % (64 if fmt == "q8_0" else STEPS[fmt]) == 0


@triton.jit
def store_terms(x, terms, block, inside, K: tl.constexpr, NB: tl.constexpr):
    """Write blocks of an activation as terms. x: float32 [NB, 32]; block: int32 [NB]."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, LARGEST / largest, 0.0)
    value = tl.floor(x * scale[:, None] + 0.5).to(tl.int32)
    high = (value + 128) >> 8
    low = value - high * 256
    shift = (8 * tl.arange(0, 4))[None, None, :]
    h = tl.sum((tl.reshape(high, [NB, 8, 4]) & 255) << shift, 2)
    w = tl.sum((tl.reshape(low, [NB, 8, 4]) & 255) << shift, 2)
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(terms + at, h, mask=inside[:, None])
    tl.store(terms + K // 4 + at, w, mask=inside[:, None])
    sums = tl.sum(tl.reshape(value, [NB, 2, 16]), 2)
    at = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(terms + K // 2 + at, sums, mask=inside[:, None])
    unit = largest / LARGEST
    units = terms + K // 2 + K // 16 + block
    tl.store(units, unit.to(tl.int32, bitcast=True), mask=inside)
    total = unit * tl.sum(sums, 1).to(tl.float32)
    tl.store(units + K // 32, total.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def terms_of_rows(x, terms, K: tl.constexpr, NB: tl.constexpr):
    """Terms of rows of x, float32 [n, K]; grid: rows, and groups of NB blocks."""
    row = tl.program_id(0)
    block = tl.program_id(1) * NB + tl.arange(0, NB)
    inside = block < K // 32
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * K + at, mask=inside[:, None], other=0.0)
    words: tl.constexpr = K // 2 + K // 8
    store_terms(values, terms + row * words, block, inside, K, NB)
