"""Products of activations with packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.errors import InternalError
from headrace.formats.base import PackedTensor
from headrace.ops.cpu import _native
from headrace.ops.cpu.arguments import address, in_range, rows_of
from headrace.ops.cpu.matrix import handle
from headrace.ops.records import Activation, ExpertWeights

# enum class Activation, native/kernels.h
ACTIVATION_NUMBERS = {"silu": 0, "swiglu_clamped": 1, "gelu_tanh": 2}
_EXPERTS = "_cpu_experts"


def activation_number(act: Activation) -> int:
    if act.kind not in ACTIVATION_NUMBERS:
        raise InternalError(
            f"activation {act.kind!r}: expected one of {', '.join(ACTIVATION_NUMBERS)}"
        )
    return ACTIVATION_NUMBERS[act.kind]


def dequantize(weight: PackedTensor) -> torch.Tensor:
    """The weights as float32 [rows, cols], exactly. For tests and tools."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    _native.dequantize(handle(weight), out.data_ptr())
    return out


def embed(weight: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``weight`` [V, D]: int64 ids [T] -> float32 [T, D]."""
    m = handle(weight)
    if ids.dtype is not torch.int64:
        raise InternalError(f"ids: found {ids.dtype}, expected torch.int64")
    ids = ids.contiguous()
    out = torch.empty((ids.numel(), m.cols), dtype=torch.float32)
    in_range(
        _native.embed(m, ids.data_ptr(), ids.numel(), out.data_ptr()),
        ids,
        f"0 to {m.rows - 1}",
        "ids",
    )
    return out


def linear(
    x: torch.Tensor,
    weight: PackedTensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias (+ residual): float32 [T, K] and weights [N, K] -> float32 [T, N]."""
    m = handle(weight)
    rows = m.rows
    x = rows_of(x, m.cols, "x")
    tokens = x.shape[0]
    out = x.new_empty(tokens, rows)
    if residual is not None:
        residual = rows_of(residual, rows, "residual")
    _native.linear(
        m,
        x.data_ptr(),
        tokens,
        out.data_ptr(),
        address(bias, rows, "bias"),
        address(residual, tokens * rows, "residual"),
    )
    return out


def tiled_linear(x: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """x W^T on matrix tiles whatever the number of rows, [T, K] -> [T, N]. For tests and benchmarks.

    Raises:
        InternalError: the instruction set in use has no tiles.
    """
    m = handle(weight)
    x = rows_of(x, m.cols, "x")
    out = torch.empty((x.shape[0], m.rows), dtype=torch.float32)
    if not _native.tiled_linear(m, x.data_ptr(), x.shape[0], out.data_ptr()):
        raise InternalError(f"{_native.isa()} has no matrix tiles: {_native.why_no_tiles()}")
    return out


def linear_group(
    x: torch.Tensor, weights: Sequence[PackedTensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Several products of the same ``x`` [T, K], in one wake of the workers -> float32 [T, Ni]."""
    if len(biases) != len(weights):
        raise InternalError(f"linear_group: {len(weights)} weights and {len(biases)} biases")
    matrices = [handle(w) for w in weights]
    cols = matrices[0].cols
    x = rows_of(x, cols, "x")
    tokens = x.shape[0]
    outs: list[torch.Tensor] = []
    where: list[int] = []
    for m, b in zip(matrices, biases, strict=True):
        if m.cols != cols:
            raise InternalError(f"linear_group: weights of {cols} and of {m.cols} columns")
        outs.append(x.new_empty(tokens, m.rows))
        where.append(address(b, m.rows, "bias"))
    _native.linear_group(matrices, x.data_ptr(), tokens, [o.data_ptr() for o in outs], where)
    return tuple(outs)


def gated_linear(
    x: torch.Tensor, gate: PackedTensor, up: PackedTensor, act: Activation
) -> torch.Tensor:
    """act(x gate^T, x up^T): float32 [T, K] and two weights [I, K] -> float32 [T, I]."""
    g, u = handle(gate), handle(up)
    if (g.rows, g.cols) != (u.rows, u.cols):
        raise InternalError(f"gated_linear: gate {list(gate.shape)}, up {list(up.shape)}")
    x = rows_of(x, g.cols, "x")
    tokens = x.shape[0]
    out = x.new_empty(tokens, g.rows)
    _native.gated_linear(
        g, u, x.data_ptr(), tokens, activation_number(act), act.alpha, act.limit, out.data_ptr()
    )
    return out


def _experts(experts: ExpertWeights) -> tuple[_native.Experts, int, int]:
    """The native record of a layer's experts, their number and the hidden size; made once."""
    found = experts.__dict__.get(_EXPERTS)
    if found is None:
        count = len(experts.gate)
        inner, hidden = experts.gate[0].shape
        for name, matrices, shape in (
            ("gate", experts.gate, (inner, hidden)),
            ("up", experts.up, (inner, hidden)),
            ("down", experts.down, (hidden, inner)),
        ):
            bad = [tuple(m.shape) for m in matrices if tuple(m.shape) != shape]
            if len(matrices) != count or bad:
                raise InternalError(
                    f"experts.{name}: expected {count} matrices of {list(shape)}, "
                    f"found {len(matrices)}, wrong shapes {bad[:1]}"
                )
        native = _native.make_experts(
            [handle(m) for m in experts.gate],
            [handle(m) for m in experts.up],
            [handle(m) for m in experts.down],
            address(experts.gate_bias, count * inner, "gate_bias"),
            address(experts.up_bias, count * inner, "up_bias"),
            address(experts.down_bias, count * hidden, "down_bias"),
        )
        found = experts.__dict__[_EXPERTS] = (native, count, hidden)
    return found


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    act: Activation,
) -> torch.Tensor:
    """Sum over slots of weights[t, s] * expert ids[t, s] of x[t]; slots with id -1 add nothing.

    x: float32 [T, D]; ids: int32 [T, k]; weights: float32 [T, k] -> float32 [T, D]

    Raises:
        InternalError: an id is neither -1 nor an expert's.
    """
    native, count, hidden = _experts(experts)
    x = rows_of(x, hidden, "x")
    tokens = x.shape[0]
    if ids.dtype is not torch.int32 or ids.dim() != 2 or ids.shape[0] != tokens:
        raise InternalError(
            f"ids: found {ids.dtype} {list(ids.shape)}, expected int32 [{tokens}, k]"
        )
    k = ids.shape[1]
    ids = ids.contiguous()
    weights = rows_of(weights, k, "weights")
    out = x.new_empty(tokens, hidden)
    bad = _native.moe(
        native,
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        tokens,
        k,
        activation_number(act),
        act.alpha,
        act.limit,
        out.data_ptr(),
    )
    in_range(bad, ids, f"-1 to {count - 1}", "ids")
    return out
