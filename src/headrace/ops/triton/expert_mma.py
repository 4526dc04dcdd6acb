"""Rows of MXFP4 experts times one activation on the integer tensor cores of a warp.

An ``mma`` of 16 rows by 8 columns by 32 bytes adds over four lanes, whose blocks of 32 weights have
different scales. So the activation goes in as eight columns that are zero but for one lane's bytes:
columns 2 t and 2 t + 1 hold the high and the low terms of what lane t of four multiplies, and each
lane gets the sums of its own block of its own two rows. The tensor core does the products of
``expert_rows`` (32 ``dp4a`` of a block and two rows) in four instructions, with the same exact integers.

A lane loads 16 bytes, one block, of row g of 8 and of row g + 8; four lanes make 64 bytes of a row.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_rows import (
    BLOCK,
    INTERPRETED,
    NUM_PLANES,
    dot4,
    gated,
    power_of_two,
    store_partial,
    store_planes,
    unpack,
)

TILE_BLOCKS = tl.constexpr(4)  # blocks of a row that a warp takes at once
TILE_WORDS = tl.constexpr(16)

_UNPACK = """
            xor.b32 x, {w}, 0x88888888;
            prmt.b32 p, $20, 0x18141210, {w};
            prmt.b32 q, $22, 0x00040608, x;
            or.b32 {low}, p, q;
            shr.u32 h, {w}, 16;
            shr.u32 x, x, 16;
            prmt.b32 p, $20, 0x18141210, h;
            prmt.b32 q, $22, 0x00040608, x;
            or.b32 {high}, p, q;
"""
_MMA = (
    "            mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {c0,c1,c2,c3}, {a0,a1,a2,a3}, "
    "{$X,$Y}, {c0,c1,c2,c3};\n"
)


def _assembly() -> str:
    """$0, $1: results of both rows; $2-$9: four words of each; $10-$17: x; $18, $19: the correction;
    $20, $22: the lower halves of the two byte tables."""
    text = """{
            .reg .b32 x, h, p, q, a0, a1, a2, a3, c0, c1, c2, c3;
            mov.b32 c0, 0; mov.b32 c1, $18; mov.b32 c2, 0; mov.b32 c3, $19;
"""
    for word in range(4):
        text += _UNPACK.format(w=f"${2 + 2 * word}", low="a0", high="a2")
        text += _UNPACK.format(w=f"${3 + 2 * word}", low="a1", high="a3")
        text += _MMA.replace("$X", f"${10 + 2 * word}").replace("$Y", f"${11 + 2 * word}")
    return (
        text
        + """            mad.lo.s32 $0, c0, 256, c1;
            mad.lo.s32 $1, c2, 256, c3;
            }"""
    )


_ASSEMBLY = tl.constexpr(_assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 2 + ["r"] * 22))


@triton.jit
def _words(x, GROUPS: tl.constexpr):
    """[2, GROUPS, 16] -> four tensors [2, GROUPS, 4]: the words of each block."""
    even, odd = tl.split(tl.reshape(x, [2, GROUPS, 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _products(
    w, planes, sums, zero, tile, STRIDE: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr
):
    """int32 [2, GROUPS, 4]: exact products of each block of both rows with its activations.

    w: int32 [2 * GROUPS, 16], rows of index 0 first; planes: of the activation, STRIDE words each; zero:
    a 0 that the compiler cannot see, or it would fetch the byte tables anew for every use.
    """
    word = tl.arange(0, TILE_WORDS)
    at = tile * TILE_WORDS + word
    block = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    if INTERPRETED:
        inside = at < K // 8
        u0, u1 = unpack(tl.reshape(w, [2, GROUPS, 16]))
        h0 = tl.load(planes + at, mask=inside, other=0)[None, None, :] + tl.zeros_like(u0)
        h1 = tl.load(planes + STRIDE + at, mask=inside, other=0)[None, None, :] + tl.zeros_like(u0)
        l0 = tl.load(planes + 2 * STRIDE + at, mask=inside, other=0)[None, None, :] + tl.zeros_like(
            u0
        )
        l1 = tl.load(planes + 3 * STRIDE + at, mask=inside, other=0)[None, None, :] + tl.zeros_like(
            u0
        )
        minus = tl.load(sums + block, mask=block < K // BLOCK, other=0)
        high = dot4(u1, h1, dot4(u0, h0, tl.zeros_like(u0)))
        low = dot4(u1, l1, dot4(u0, l0, tl.zeros_like(u0)))
        total = tl.sum(tl.reshape(high * 256 + low, [2, GROUPS, 4, 4]), 3)
        return total + minus[None, None, :]
    else:
        i = tl.arange(0, 2 * GROUPS)
        column = i % 8
        plane = (column % 2) * 2 + i // GROUPS
        mine = (column // 2)[:, None] == (word // 4)[None, :]
        x = tl.load(
            planes + plane[:, None] * STRIDE + at[None, :],
            mask=mine & (at < K // 8)[None, :], other=0,
        )  # fmt: skip
        group = tl.zeros([GROUPS, 1], tl.int32)
        inside = (block < K // BLOCK)[None, :] & (group == 0)
        minus = tl.load(sums + block[None, :] + group, mask=inside, other=0)
        w0, w1, w2, w3 = _words(tl.reshape(w, [2, GROUPS, 16]), GROUPS)
        x0, x1, x2, x3 = _words(tl.reshape(x, [2, GROUPS, 16]), GROUPS)
        minus = tl.broadcast_to(minus[None, :, :], [2, GROUPS, 4])
        return tl.inline_asm_elementwise(
            _ASSEMBLY,
            _CONSTRAINTS,
            [
                w0,
                w1,
                w2,
                w3,
                x0,
                x1,
                x2,
                x3,
                minus,
                minus * 0 + (0x0F0E0D0C ^ zero),
                minus * 0 + (0x090A0B0C ^ zero),
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def mma_rows(
    codes, scales, planes, sums, units, zero, row, num_rows, scale_stride, K: tl.constexpr,
    LENGTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """float32 [2, GROUPS]: of rows row + 2 g and row + 2 g + 1, times one activation of LENGTH values.

    codes: int32 pointer, rows of K / 8; scales: uint8 pointer, rows of K / 32 = ``scale_stride`` (see
    ``expert_rows``); planes, sums, units: the activation's, from the row's first column on.
    """
    i = tl.arange(0, 2 * GROUPS)
    r = row + (i % GROUPS) * 2 + i // GROUPS
    ok = (r < num_rows)[:, None]
    group = tl.zeros([GROUPS, 1], tl.int32)
    acc = tl.zeros([2, GROUPS, 4], tl.float32)
    for tile in tl.static_range(0, (K // BLOCK + TILE_BLOCKS - 1) // TILE_BLOCKS):
        at = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)
        block = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        w = tl.load(
            codes + r[:, None] * (K // 8) + at[None, :], mask=ok & (at < K // 8)[None, :], other=0
        )
        inside = (block < K // BLOCK)[None, :]
        e = tl.load(scales + r[:, None] * scale_stride + block[None, :], mask=ok & inside, other=0)
        unit = tl.load(units + block[None, :] + group, mask=inside & (group == 0), other=0.0)
        total = _products(w, planes, sums, zero, tile, LENGTH // 8, K, GROUPS)
        scale = power_of_two(tl.reshape(e, [2, GROUPS, 4])) * unit[None, :, :]
        acc += total.to(tl.float32) * scale
    return tl.sum(acc, 2)


@triton.jit(do_not_specialize=["scale_stride"])
def mma_gate_up(
    arena, entries, counts, pair_token, planes, units, h_planes, h_units, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """As ``expert_matvec.mxfp4_gate_up``; four warps, whose 64 rows make one block of activations."""
    groups: tl.constexpr = 8 * WARPS
    num_tiles = 2 * WIDTH // (2 * groups)
    total = tl.load(counts + WHICH) * num_tiles
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * (2 * groups)
        base = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        for pair in range(first, last):
            token = tl.load(pair_token + pair)
            own = planes + token * (NUM_PLANES * (HIDDEN // 8))
            y = mma_rows(
                (base + AT_CODES).to(tl.pointer_type(tl.int32)), base + AT_SCALES, own,
                own + 5 * (HIDDEN // 8), units + token * (HIDDEN // BLOCK), first >> 31, row, 2 * WIDTH,
                scale_stride, HIDDEN, HIDDEN, groups,
            )  # fmt: skip
            side = tl.arange(0, 2)[:, None]
            if HAS_BIAS:
                r = row + tl.arange(0, groups)[None, :] * 2 + side
                y += tl.load((base + AT_BIAS).to(tl.pointer_type(tl.float32)) + r)
            gate = tl.sum(tl.where(side == 0, y, 0.0), 0)
            up = tl.sum(tl.where(side == 0, 0.0, y), 0)
            act = gated(gate, up, CLAMPED, ALPHA, LIMIT)
            blocks: tl.constexpr = groups // BLOCK
            at = (piece * WIDTH + row // 2) // BLOCK + tl.arange(0, blocks)
            store_planes(
                tl.reshape(act, [blocks, BLOCK]), h_planes + pair * (NUM_PLANES * (S * WIDTH // 8)),
                h_units + pair * (S * WIDTH // BLOCK), at, at >= 0, S * WIDTH, blocks,
            )  # fmt: skip


@triton.jit(do_not_specialize=["scale_stride"])
def mma_down(
    arena, entries, counts, pair_weight, h_planes, h_units, partial, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """As ``expert_matvec.mxfp4_down``."""
    groups: tl.constexpr = 8 * WARPS
    num_tiles = (HIDDEN + 2 * groups - 1) // (2 * groups)
    total = tl.load(counts + WHICH) * num_tiles
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * (2 * groups)
        base = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        r = row + tl.arange(0, groups)[None, :] * 2 + tl.arange(0, 2)[:, None]
        for pair in range(first, last):
            own = h_planes + pair * (NUM_PLANES * (S * WIDTH // 8))
            y = mma_rows(
                (base + AT_CODES).to(tl.pointer_type(tl.int32)), base + AT_SCALES,
                own + piece * (WIDTH // 8), own + 5 * (S * WIDTH // 8) + piece * (WIDTH // BLOCK),
                h_units + (pair * S + piece) * (WIDTH // BLOCK), first >> 31, row, HIDDEN, scale_stride,
                WIDTH, S * WIDTH, groups,
            )  # fmt: skip
            store_partial(
                y, base + AT_BIAS, pair_weight + pair, partial + (pair * S + piece) * HIDDEN, r,
                HAS_BIAS, HIDDEN,
            )  # fmt: skip
