"""What the expert kernels share: activations, partial results, rows of bfloat16, exact integer products."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

BLOCK = tl.constexpr(32)  # MXFP4 weights that share a scale
# 127 * 256: the high term of the largest value stays an int8 after rounding.
LARGEST = tl.constexpr(32512.0)


@triton.jit
def dot4(bytes_, terms, acc):
    """acc + four unsigned bytes times four signed bytes."""
    if INTERPRETED:
        for i in tl.static_range(4):  # pyright: ignore
            term = ((terms >> (8 * i)) & 255).to(tl.int8).to(tl.int32)
            acc += ((bytes_ >> (8 * i)) & 255) * term
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [bytes_, terms, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def power_of_two(e):
    """2 ** (e - 127) of an E8M0 byte; 0 for byte 0, whose 2 ** -127 float32 products flush anyway."""
    return (e.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def bf16_rows(
    data, x, row, num_rows, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """float32 [ROWS]: rows of a bfloat16 matrix times the float32 activation ``x`` [K]."""
    r = row + tl.arange(0, ROWS)
    ok = r < num_rows
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.static_range(0, K, COLS):
        k = start + tl.arange(0, COLS)
        w = tl.load(
            data + r[:, None] * K + k[None, :],
            mask=ok[:, None] & (k < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        acc += w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The gated activation of ``ops.records.Activation``."""
    if CLAMPED:
        g = tl.minimum(gate, LIMIT)
        u = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return g / (1.0 + tl.exp(-ALPHA * g)) * (u + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_partial(y, bias, weight, out, r, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias.to(tl.pointer_type(tl.float32)) + r, mask=r < HIDDEN, other=0.0)
    tl.store(out + r, y * tl.load(weight), mask=r < HIDDEN)
