"""Rows of MXFP4 experts times one activation on the float16 tensor cores of a warp.

An E2M1 code's bits are a float16's, times 2 ** -14: sign, two bits of exponent, one of mantissa. So
weights become float16 exactly by masks and shifts (11 instructions for eight). Activations are two
float16 terms, the second 2 ** -11 of the first: 22 bits, finer than two int8 terms of a block, and in no
need of a block's largest value.

An ``mma`` of 16 rows by 8 columns by 16 values adds over four lanes, whose blocks of 32 weights have
different scales. So the activation goes in as eight columns that are zero but for one lane's values:
columns 2 t and 2 t + 1 hold both terms of what lane t of four multiplies, and each lane gets the sums of
its own block of its own two rows.

*halves* of an activation: float16 [2, K], first and second term; of each eight values in the order 0 4 1
5 2 6 3 7, in which a word's codes come apart; times HALF_SCALE.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import STATE_NOW
from headrace.ops.triton.expert_rows import BLOCK, INTERPRETED, power_of_two, store_partial
from headrace.ops.triton.overlap import wait, wait_and_release
from headrace.ops.triton.shared_words import fence_system

TILE_BLOCKS = tl.constexpr(4)  # blocks of a row that a warp takes at once
TILE_WORDS = tl.constexpr(16)
AT_ONCE = tl.constexpr(8)  # tiles: 16 bytes of two rows a lane each
# Activations up to 4 million, down to 2 ** -29 in steps of the second term.
HALF_SCALE = tl.constexpr(2.0**-6)
SECOND = tl.constexpr(2048.0)  # 2 ** 11
RESULT = tl.constexpr(2.0**20)  # undoes HALF_SCALE and the codes' 2 ** -14

# One word of each of two rows: the four registers of four pairs of codes (n, n + 4).
_UNPACK = """
            shr.u32 u, {w}, 3;
            lop3.b32 u, {w}, u, 0x80808080, 0xE4;
            shl.b32 v, {w}, 4;
            shl.b32 x, {w}, 1;
            lop3.b32 v, v, x, 0x80808080, 0xE4;
            shl.b32 {p0}, v, 8;
            and.b32 {p0}, {p0}, 0x8E008E00;
            shl.b32 {p1}, u, 8;
            and.b32 {p1}, {p1}, 0x8E008E00;
            and.b32 {p2}, v, 0x8E008E00;
            and.b32 {p3}, u, 0x8E008E00;
"""
_MMA = (
    "            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0,c1,c2,c3}, "
    "{$A}, {$X,$Y}, {c0,c1,c2,c3};\n"
)


def _assembly() -> str:
    """$0, $1: sums of both rows; $2-$9: four words of each; $10-$25: the block's halves."""
    text = """{
            .reg .b32 u, v, x, a0, a1, a2, a3, b0, b1, b2, b3;
            .reg .f32 c0, c1, c2, c3;
            mov.b32 c0, 0; mov.b32 c1, 0; mov.b32 c2, 0; mov.b32 c3, 0;
"""
    for word in range(4):
        for row, regs in ((0, "a"), (1, "b")):
            names = {f"p{i}": f"{regs}{i}" for i in range(4)}
            text += _UNPACK.format(w=f"${2 + 2 * word + row}", **names)
        for half in range(2):
            # Of the first two words' halves one after the other, then of the last two's.
            at = 10 + 8 * (word // 2) + word % 2 + 4 * half
            a = f"a{2 * half},b{2 * half},a{2 * half + 1},b{2 * half + 1}"
            text += _MMA.replace("$A", a).replace("$X", f"${at}").replace("$Y", f"${at + 2}")
    return (
        text
        + """            fma.rn.f32 $0, c1, 0f3A000000, c0;
            fma.rn.f32 $1, c3, 0f3A000000, c2;
            }"""
    )


_ASSEMBLY = tl.constexpr(_assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 2 + ["r"] * 24))


@triton.jit
def _words(x, GROUPS: tl.constexpr):
    """[2, GROUPS, 16] -> four tensors [2, GROUPS, 4]: the words of each block."""
    even, odd = tl.split(tl.reshape(x, [2, GROUPS, 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def plain_products(w, halves, block, K: tl.constexpr, STRIDE: tl.constexpr, GROUPS: tl.constexpr):
    """What the assembly computes, for the interpreter. block: [GROUPS, 4]."""
    w = tl.reshape(w, [2, GROUPS, 4, 4])
    total = tl.zeros([2, GROUPS, 4], tl.float32)
    at = block[None, :, :, None] * BLOCK + tl.arange(0, 4)[None, None, None, :] * 8
    for i in tl.static_range(8):  # pyright: ignore
        code = (w >> (4 * i)) & 15
        m = code & 7
        twice = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16))
        value = tl.where(code > 7, -twice, twice).to(tl.float32) * (0.5**15)
        own = at + (i % 4) * 2 + i // 4
        first = tl.load(halves + own, mask=own < K, other=0.0).to(tl.float32)
        second = tl.load(halves + STRIDE + own, mask=own < K, other=0.0).to(tl.float32)
        total += tl.sum(value * (first + second / SECOND), 3)
    return total


@triton.jit
def products(w, x, y, GROUPS: tl.constexpr):
    """The assembly. w: as in ``_block_products``; x, y: int32 [2 * GROUPS, 16], halves of the lanes' blocks
    or zeros: of the first 8 words those of even rows, then of odd ones; y: of the last 8."""
    w0, w1, w2, w3 = _words(tl.reshape(w, [2, GROUPS, 16]), GROUPS)
    x0, x1, x2, x3 = _words(tl.reshape(x, [2, GROUPS, 16]), GROUPS)
    y0, y1, y2, y3 = _words(tl.reshape(y, [2, GROUPS, 16]), GROUPS)
    return tl.inline_asm_elementwise(
        _ASSEMBLY, _CONSTRAINTS, [w0, w1, w2, w3, x0, x1, x2, x3, y0, y1, y2, y3],
        dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _block_products(
    w, halves, TILE: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, WARPS_K: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """float32 [2, GROUPS, 4]: each block of both rows, of the warps' TILE-th, times its activations.

    w: int32 [2 * GROUPS, 16], rows of index 0 first; halves: the activation's, STRIDE values a term.
    """
    groups: tl.constexpr = GROUPS // WARPS_K
    if INTERPRETED:
        own = (TILE * WARPS_K + tl.arange(0, GROUPS) // groups) * TILE_BLOCKS
        block = own[:, None] + tl.arange(0, TILE_BLOCKS)[None, :]
        return plain_products(w, halves, block, K, STRIDE, GROUPS)
    else:
        words = halves.to(tl.pointer_type(tl.int32))
        i = tl.arange(0, 2 * GROUPS)
        word = tl.arange(0, TILE_WORDS)
        column = i % 8
        block = ((i % GROUPS) // groups * TILE_BLOCKS)[:, None] + (word // 4)[None, :]
        # Rows of index 1 take the second 4 of 8 words.
        part = (column % 2) * (STRIDE // 2) + (i // GROUPS) * 4
        # Constants are added to pointers, not to 32-bit offsets: they end up in the instructions.
        own = words + (part[:, None] + block * 16 + (word % 4)[None, :])
        tile: tl.constexpr = TILE * WARPS_K * TILE_BLOCKS
        mine = (column // 2)[:, None] == (word // 4)[None, :]
        if tile + WARPS_K * TILE_BLOCKS > K // BLOCK:
            mine = mine & (block < K // BLOCK - tile)
        x = tl.load(own + tile * 16, mask=mine, other=0)
        y = tl.load(own + (tile * 16 + 8), mask=mine, other=0)
        return products(w, x, y, GROUPS)


@triton.jit
def _tile(
    codes, scales, row, num_rows, scale_stride, TILE: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, WARPS_K: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Codes int32 [2 * GROUPS, 16] and scales uint8 [2 * GROUPS, 4] of the warps' TILE-th blocks.

    Rows row + 2 g and row + 2 g + 1 of group g are one thread's: gate and up of one column. ROWS: of a
    program; a whole matrix of a multiple of ROWS rows needs no mask, nor do tiles of whole blocks.
    """
    groups: tl.constexpr = GROUPS // WARPS_K  # of the program's rows
    i = tl.arange(0, 2 * GROUPS)
    q = i % GROUPS
    r = row + (q % groups) * 2 + i // GROUPS
    part = q // groups * TILE_BLOCKS
    at = part[:, None] * 4 + tl.arange(0, TILE_WORDS)[None, :]
    b = part[:, None] + tl.arange(0, TILE_BLOCKS)[None, :]
    tile: tl.constexpr = TILE * WARPS_K * TILE_BLOCKS
    code = codes + (r[:, None] * (K // 8) + at)
    scale = scales + (r[:, None] * scale_stride + b)
    if tile + WARPS_K * TILE_BLOCKS <= K // BLOCK and num_rows % ROWS == 0:
        w = tl.load(code + tile * 4, eviction_policy="evict_first")
        e = tl.load(scale + tile)
    else:
        ok = (r < num_rows)[:, None] & (b < K // BLOCK - tile)
        some = (r < num_rows)[:, None] & (at < K // 8 - tile * 4)
        w = tl.load(code + tile * 4, mask=some, other=0, eviction_policy="evict_first")
        e = tl.load(scale + tile, mask=ok, other=0)
    return w, e


@triton.jit
def _tiles(
    codes, scales, row, num_rows: tl.constexpr, scale_stride, K: tl.constexpr, ROWS: tl.constexpr,
    WARPS_K: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The first tiles of the program's rows, on their way; registers hold AT_ONCE of them."""
    all: tl.constexpr = (K // BLOCK + TILE_BLOCKS * WARPS_K - 1) // (TILE_BLOCKS * WARPS_K)
    tiles: tl.constexpr = all if all < AT_ONCE else AT_ONCE
    ws = ()
    es = ()
    for tile in tl.static_range(tiles):  # pyright: ignore
        w, e = _tile(codes, scales, row, num_rows, scale_stride, tile, K, ROWS, WARPS_K, GROUPS)
        ws = ws + (w,)  # noqa: RUF005 (Triton's tuples know no stars)
        es = es + (e,)  # noqa: RUF005
    return ws, es


@triton.jit
def _rows_product(
    ws, es, codes, scales, row, num_rows: tl.constexpr, scale_stride, halves, K: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, WARPS_K: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """float32 [2, ROWS / 2]: the rows times one activation of STRIDE values a term. Tiles beyond
    those in registers are read for each activation."""
    all: tl.constexpr = (K // BLOCK + TILE_BLOCKS * WARPS_K - 1) // (TILE_BLOCKS * WARPS_K)
    groups: tl.constexpr = GROUPS // WARPS_K
    acc = tl.zeros([2, GROUPS, 4], tl.float32)
    for tile in tl.static_range(len(ws)):  # pyright: ignore
        total = _block_products(ws[tile], halves, tile, K, STRIDE, WARPS_K, GROUPS)
        acc += total * power_of_two(tl.reshape(es[tile], [2, GROUPS, 4]))
    for tile in tl.static_range(len(ws), all):  # pyright: ignore
        w, e = _tile(codes, scales, row, num_rows, scale_stride, tile, K, ROWS, WARPS_K, GROUPS)
        total = _block_products(w, halves, tile, K, STRIDE, WARPS_K, GROUPS)
        acc += total * power_of_two(tl.reshape(e, [2, GROUPS, 4]))
    y = tl.sum(acc, 2)
    if WARPS_K > 1:
        y = tl.sum(tl.reshape(y, [2, WARPS_K, groups]), 1)
    return y * RESULT


@triton.jit
def store_halves(x, halves, at, inside, STRIDE: tl.constexpr):
    """Write values ``at`` of an activation as halves."""
    scaled = x * HALF_SCALE
    first = scaled.to(tl.float16)
    second = ((scaled - first.to(tl.float32)) * SECOND).to(tl.float16)
    i = at % 8
    own = halves + (at - i) + (i % 4) * 2 + i // 4
    tl.store(own, first, mask=inside)
    tl.store(own + STRIDE, second, mask=inside)


@triton.jit(do_not_specialize=["scale_stride"])
def halves_down(
    arena, entries, counts, pair_weight, h_halves, partial, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, WARPS_K: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial[pair, slice] = weight * (down h + bias), float32 [pairs, S, HIDDEN]."""
    groups: tl.constexpr = 8 * WARPS
    columns: tl.constexpr = groups // WARPS_K
    rows: tl.constexpr = 2 * columns
    num_tiles = (HIDDEN + rows - 1) // rows
    item = tl.program_id(0)
    # The list was whole before the kernel that this one may overlap began; h was not.
    entry = entries + (item // num_tiles) * 4
    slot = tl.load(entry)
    first = tl.load(entry + 2)
    total = tl.load(counts + WHICH) * num_tiles
    while item < total:
        row = (item % num_tiles) * rows
        base = arena + slot.to(tl.int64) * SLICE_NBYTES
        codes = (base + AT_CODES).to(tl.pointer_type(tl.int32))
        ws, es = _tiles(
            codes, base + AT_SCALES, row, HIDDEN, scale_stride, WIDTH, rows, WARPS_K, groups
        )
        piece = tl.load(entry + 1) % S
        last = first + tl.load(entry + 3)
        r = row + tl.arange(0, columns)[None, :] * 2 + tl.arange(0, 2)[:, None]
        wait_and_release(PDL)
        for pair in range(first, last):
            own = h_halves + pair * (2 * S * WIDTH) + piece * WIDTH
            y = _rows_product(
                ws, es, codes, base + AT_SCALES, row, HIDDEN, scale_stride, own, WIDTH, S * WIDTH,
                rows, WARPS_K, groups,
            )  # fmt: skip
            store_partial(
                y, base + AT_BIAS, pair_weight + pair, partial + (pair * S + piece) * HIDDEN, r,
                HAS_BIAS, HIDDEN,
            )  # fmt: skip
        item += tl.num_programs(0)
        entry = entries + (item // num_tiles) * 4
        slot = tl.load(entry, mask=item < total, other=0)
        first = tl.load(entry + 2, mask=item < total, other=0)
    wait(PDL)  # programs without work, too: what follows may rely on all before


@triton.jit
def expert_prepare(
    x, halves, block, state, layer, AT_X: tl.constexpr, AT_READY: tl.constexpr, L: tl.constexpr,
    HIDDEN: tl.constexpr, COLS: tl.constexpr, MXFP4: tl.constexpr, HAS_CPU: tl.constexpr,
    NUMBERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Give every row of x to the CPU (float32) and to the next kernels (halves). NUMBERED: one row, and the
    CPU is told when each part of COLS columns is there."""
    token = tl.program_id(0)
    at = tl.program_id(1) * COLS + tl.arange(0, COLS)
    wait_and_release(PDL)
    row = tl.load(x + token * HIDDEN + at, mask=at < HIDDEN, other=0.0)
    if HAS_CPU:
        target = block.to(tl.pointer_type(tl.float32)) + AT_X + token * HIDDEN
        tl.store(target + at, row, mask=at < HIDDEN)
        if NUMBERED:
            tl.debug_barrier()
            fence_system()
            number = tl.load(state + STATE_NOW) * L + layer + 1
            tl.store(block + AT_READY + tl.program_id(1), number)
    if MXFP4:
        store_halves(row, halves + token * (2 * HIDDEN), at, at < HIDDEN, HIDDEN)
