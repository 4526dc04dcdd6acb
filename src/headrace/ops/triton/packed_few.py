"""Products of few rows with packed matrices (a decoding step), which are read as they are stored.

What binds is reading the weights once, so a matrix of GGUF blocks takes 0.28 to 0.53 of bfloat16's time
wherever unpacking keeps up. Activations are cut into integers once (``expert_terms``) for formats that are
multiplied so, and stay float32 for the others; both are finer than the bfloat16 of the plain kernels.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.core.block_planes import SCALES_APART
from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.expert_terms import STEPS, has_terms, term_words, terms_of_rows
from headrace.ops.triton.few_rows import MAX_GROUP, activated
from headrace.ops.triton.packed_rows import packed_rows
from headrace.ops.triton.unpack import GROUPS

# Compiled without the compiler's own fusing of products and sums, which it chose otherwise for programs of
# one and of four activations (Q4_K on an H200): the kernels say what is fused.

# Formats that are multiplied as stored: those without factors beside their blocks.
PACKED = frozenset(GROUPS) - {"bf16", "f16", "f32", "fp8_e4m3", "nvfp4"}
# Whose scales fewer warps would exchange among themselves (``expert_terms``).
_SCALES_FOR_ALL = ("q6_k", "q4_0")
_MOST_TOKENS = 4  # of a program
_TERM_BLOCKS = 8  # of a program that cuts an activation into terms
_INTERPRETED_ROWS = 128  # the interpreter's time goes with the number of operations


@dataclass(frozen=True)
class PackedTuning:
    """rows: of a program; columns: at once, by floats; ahead: steps loaded ahead, by integers, 2 or 4.

    split: parts of a row at most, for matrices of up to split_rows rows; split_rows_of: of a program there;
    split_warps: for each part, twice as many where scales come four a row and step.

    H200, 2026-11-30, in a graph, read-only 4,320 GB/s. Q4_K, Q5_K, Q6_K, Q8_0 and Q4_0 of 151,936 x 2,048
    (bf16: 150 us): 66, 83, 76, 87 and 57 us; 8 rows a program take 88 us in Q4_K, 4 steps ahead 80.
    2,048 x 4,096 (bf16: 8.7): Q4_K, Q6_K, Q8_0 6.2, 6.1, 6.2 in four parts of 8 rows; of 16 rows 6.5, 7.9,
    7.3; in one part 9.3, 12.2, 14.3. 5,120 x 2,048 (bf16: 8.5): Q4_K 5.2; 16 rows 5.8, in one part 5.9.
    Four activations in Q4_K, Q6_K, Q8_0, 5,120 x 2,048: 15, 18 and 11 us (bf16: 8.9).
    """

    rows: int = 16
    warps: int = 2
    ahead: int = 2
    split: int = 4
    split_rows: int = 8192
    split_rows_of: int = 8
    split_warps: int = 1
    float_rows: int = 8
    float_warps: int = 4
    columns: int = 256
    terms: bool = True


TUNING = PackedTuning()


@triton.jit
def _store(
    y0, y1, y2, y3, out, bias, residual, row, num_rows, token, num_tokens, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    r = row + tl.arange(0, ROWS)
    ok = r < num_rows
    if HAS_BIAS:
        b = tl.load(bias + r, mask=ok, other=0.0)
        y0, y1, y2, y3 = y0 + b, y1 + b, y2 + b, y3 + b
    ys = (y0, y1, y2, y3)
    for i in tl.static_range(TOKENS):
        at = (token + i).to(tl.int64) * num_rows + r
        mask = ok & (token + i < num_tokens)
        y = ys[i]
        if HAS_RESIDUAL:
            y += tl.load(residual + at, mask=mask, other=0.0)
        tl.store(out + at, y, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def packed_linear_kernel(
    x, terms, c0, c1, c2, s0, s1, s2, b0, b1, b2, o0, o1, o2, residual, num_tokens, rows0, rows1,
    rows2,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
    T2: tl.constexpr, CS0: tl.constexpr, CS1: tl.constexpr, CS2: tl.constexpr, SS0: tl.constexpr,
    SS1: tl.constexpr, SS2: tl.constexpr, HAS_B0: tl.constexpr, HAS_B1: tl.constexpr,
    HAS_B2: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Up to three matrices with the same input; programs are dealt out to one after the other.

    T0 ... T2: whether a matrix is multiplied by integers; CS, SS: strides of codes and of scales in bytes.
    Programs of the same rows and other tokens are neighbours.
    """
    groups = tl.cdiv(num_tokens, TOKENS)
    token = tl.program_id(0) % groups * TOKENS
    tile = tl.program_id(0) // groups
    end0 = tl.cdiv(rows0, ROWS)
    end1 = end0 + tl.cdiv(rows1, ROWS)
    if tile < end0:
        row = tile * ROWS
        y0, y1, y2, y3 = packed_rows(
            c0, s0, terms if T0 else x, row, rows0, token, num_tokens, F0, T0, K, CS0, SS0, TOKENS,
            ROWS, COLS, SPLIT, AHEAD,
        )  # fmt: skip
        _store(
            y0, y1, y2, y3, o0, b0, residual, row, rows0, token, num_tokens, HAS_B0, HAS_RESIDUAL,
            TOKENS, ROWS,
        )  # fmt: skip
    elif tile < end1:
        if COUNT > 1:
            row = (tile - end0) * ROWS
            y0, y1, y2, y3 = packed_rows(
                c1, s1, terms if T1 else x, row, rows1, token, num_tokens, F1, T1, K, CS1, SS1,
                TOKENS, ROWS, COLS, SPLIT, AHEAD,
            )  # fmt: skip
            _store(
                y0, y1, y2, y3, o1, b1, residual, row, rows1, token, num_tokens, HAS_B1, False,
                TOKENS, ROWS,
            )  # fmt: skip
    else:
        if COUNT > 2:
            row = (tile - end1) * ROWS
            y0, y1, y2, y3 = packed_rows(
                c2, s2, terms if T2 else x, row, rows2, token, num_tokens, F2, T2, K, CS2, SS2,
                TOKENS, ROWS, COLS, SPLIT, AHEAD,
            )  # fmt: skip
            _store(
                y0, y1, y2, y3, o2, b2, residual, row, rows2, token, num_tokens, HAS_B2, False,
                TOKENS, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def packed_gated_kernel(
    x, terms, gate, gate_scales, up, up_scales, out, num_tokens, num_rows, alpha, limit,
    FG: tl.constexpr, FU: tl.constexpr, TG: tl.constexpr, TU: tl.constexpr, CSG: tl.constexpr,
    CSU: tl.constexpr, SSG: tl.constexpr, SSU: tl.constexpr, CLAMPED: tl.constexpr,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = act(x gate^T, x up^T), float32 [num_tokens, num_rows]."""
    groups = tl.cdiv(num_tokens, TOKENS)
    token = tl.program_id(0) % groups * TOKENS
    row = tl.program_id(0) // groups * ROWS
    g0, g1, g2, g3 = packed_rows(
        gate, gate_scales, terms if TG else x, row, num_rows, token, num_tokens, FG, TG, K, CSG, SSG,
        TOKENS, ROWS, COLS, SPLIT, AHEAD,
    )  # fmt: skip
    u0, u1, u2, u3 = packed_rows(
        up, up_scales, terms if TU else x, row, num_rows, token, num_tokens, FU, TU, K, CSU, SSU,
        TOKENS, ROWS, COLS, SPLIT, AHEAD,
    )  # fmt: skip
    y0 = activated(g0, u0, alpha, limit, CLAMPED)
    y1 = activated(g1, u1, alpha, limit, CLAMPED)
    y2 = activated(g2, u2, alpha, limit, CLAMPED)
    y3 = activated(g3, u3, alpha, limit, CLAMPED)
    _store(
        y0, y1, y2, y3, out, out, out, row, num_rows, token, num_tokens, False, False, TOKENS, ROWS
    )


def is_packed(weight: PackedTensor) -> bool:
    """Whether these kernels read a matrix: of a format of theirs, its scales apart where they must be."""
    apart = weight.format in SCALES_APART
    return weight.format in PACKED and apart == ("codes" in weight.parts)


def planes(weight: PackedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed matrix's codes and scales (the codes once more where they hold them), uint8 [N, bytes]."""
    codes = weight.parts["codes"] if "codes" in weight.parts else weight.parts["blocks"]
    return codes, weight.parts.get("scales", codes)


def linear_packed(
    x: torch.Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None = None,
    tuning: PackedTuning = TUNING,
) -> tuple[torch.Tensor, ...]:
    """Up to three products of one input, in one launch; another one cuts it into integers.

    x: float32 [T, K], T at most 16; weights: of ``PACKED`` formats, [Ni, K], in planes; residual: float32
    [T, N0], added to the first. Returns float32 [T, Ni] each.
    """
    x = x.float().contiguous()
    count, columns = len(weights), x.shape[1]
    by_terms = [tuning.terms and has_terms(w.format, columns) for w in weights]
    terms = _terms(x) if any(by_terms) else x
    outs = tuple(torch.empty(x.shape[0], w.rows, device=x.device) for w in weights)
    pairs = [planes(w) for w in weights]
    missing = MAX_GROUP - count
    rest = [0] * missing
    rows = [w.rows for w in weights] + rest
    shape = _shape(tuning, weights, by_terms)
    program_rows, tokens = shape.rows, _tokens(x.shape[0])
    grid = triton.cdiv(x.shape[0], tokens) * sum(triton.cdiv(n, program_rows) for n in rows)
    has = [b is not None for b in biases] + [False] * missing
    spare = [outs[0]] * missing
    packed_linear_kernel[(grid,)](
        x, terms, *(c for c, _ in pairs), *spare, *(s for _, s in pairs), *spare,
        *(outs[0] if b is None else b for b in biases), *spare, *outs, *spare,
        outs[0] if residual is None else residual.contiguous(), x.shape[0], *rows,
        *(w.format for w in weights), *[""] * missing, *by_terms, *[False] * missing,
        *(c.stride(0) for c, _ in pairs), *rest, *(s.stride(0) for _, s in pairs), *rest, *has,
        residual is not None, count, columns, tokens, program_rows, tuning.columns, shape.split,
        tuning.ahead, num_warps=shape.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return outs


def gated_packed(
    x: torch.Tensor,
    gate: PackedTensor,
    up: PackedTensor,
    act: Activation,
    tuning: PackedTuning = TUNING,
) -> torch.Tensor:
    """act(x gate^T, x up^T). x: float32 [T, K], T at most 16. Returns float32 [T, I]."""
    x = x.float().contiguous()
    by_terms = [tuning.terms and has_terms(w.format, x.shape[1]) for w in (gate, up)]
    terms = _terms(x) if any(by_terms) else x
    out = torch.empty(x.shape[0], gate.rows, device=x.device)
    (g, gs), (u, us) = planes(gate), planes(up)
    shape = _shape(tuning, (gate, up), by_terms)
    rows, tokens = shape.rows, _tokens(x.shape[0])
    packed_gated_kernel[(triton.cdiv(x.shape[0], tokens) * triton.cdiv(gate.rows, rows),)](
        x, terms, g, gs, u, us, out, x.shape[0], gate.rows, act.alpha, act.limit, gate.format,
        up.format, *by_terms, g.stride(0), u.stride(0), gs.stride(0), us.stride(0),
        act.kind == "swiglu_clamped", x.shape[1], tokens, rows, tuning.columns, shape.split,
        tuning.ahead, num_warps=shape.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _terms(x: torch.Tensor) -> torch.Tensor:
    """x, float32 [T, K], as terms: int32 [T, words]."""
    count, columns = x.shape
    terms = torch.empty(count, term_words(columns), dtype=torch.int32, device=x.device)
    blocks = triton.cdiv(columns // 32, _TERM_BLOCKS)
    terms_of_rows[(count, blocks)](x, terms, columns, _TERM_BLOCKS, num_warps=4)
    return terms


@dataclass(frozen=True)
class _Shape:
    """Of a program: rows, parts of each, warps."""

    rows: int
    split: int
    warps: int


def _shape(
    tuning: PackedTuning, weights: Sequence[PackedTensor], by_terms: Sequence[bool]
) -> _Shape:
    """Depends on the matrices only: a row's result is the same whatever the number of activations."""
    split, columns = 1, weights[0].cols
    if all(by_terms) and sum(w.rows for w in weights) <= tuning.split_rows:
        step = max(STEPS[w.format] for w in weights)
        while split < tuning.split and columns % (2 * split * step) == 0:
            split *= 2
    if interpreted():
        return _Shape(_INTERPRETED_ROWS // split, split, 1)
    if not all(by_terms):
        return _Shape(tuning.float_rows, 1, tuning.float_warps)
    if split == 1:
        return _Shape(tuning.rows, 1, tuning.warps)
    warps = tuning.split_warps * (2 if weights[0].format in _SCALES_FOR_ALL else 1)
    return _Shape(tuning.split_rows_of, split, warps * split)


def _tokens(count: int) -> int:
    """One or several: a kernel takes seconds to compile."""
    return 1 if count == 1 else _MOST_TOKENS
