"""Products with dense weights: few rows by our kernels, many by cuBLAS.

The weights' own type is what is multiplied (activations are rounded to it), sums are float32. Packed weights
are multiplied as they are by few rows, and by many as bfloat16; what no kernel reads goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation
from headrace.ops.reference import dense as reference
from headrace.ops.triton.few_rows import MAX_GROUP, MAX_ROWS, gated_few, linear_few
from headrace.ops.triton.few_rows_f32 import linear_few_f32
from headrace.ops.triton.packed_few import gated_packed, is_packed, linear_packed
from headrace.ops.triton.packed_many import bands, expanded

_HALVES = ("bf16", "f16")
_FLOATS = ("f32", *_HALVES)


def linear(
    x: torch.Tensor,
    weight: PackedTensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual); see ``headrace.ops.reference.dense.linear``."""
    if _few(x, (weight,)):
        return linear_few(x, (weight,), (bias,), residual)[0]
    if weight.format == "f32" and 0 < x.shape[0] <= MAX_ROWS:
        return linear_few_f32(x, weight, bias, residual)
    if is_packed(weight):
        if 0 < x.shape[0] <= MAX_ROWS:
            return linear_packed(x, (weight,), (bias,), residual)[0]
        out = product_expanded(x, weight)
    elif weight.format not in _FLOATS:
        return reference.linear(x, weight, bias, residual)
    else:
        out = product(x.to(weight.parts["data"].dtype), weight)
    if bias is not None:
        out += bias
    if residual is not None:
        out += residual
    return out


def linear_group(
    x: torch.Tensor, weights: Sequence[PackedTensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Several ``linear`` of the same input; of few rows in one kernel."""
    same = len({w.format for w in weights}) == 1
    if len(weights) <= MAX_GROUP and same and _few(x, weights):
        return linear_few(x, weights, biases)
    if len(weights) <= MAX_GROUP and 0 < x.shape[0] <= MAX_ROWS and all(map(is_packed, weights)):
        return linear_packed(x, weights, biases)
    return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def gated_linear(
    x: torch.Tensor, gate: PackedTensor, up: PackedTensor, act: Activation
) -> torch.Tensor:
    """act(x gate^T, x up^T); see ``headrace.ops.reference.dense.gated_linear``."""
    if gate.format == up.format and _few(x, (gate, up)):
        return gated_few(x, gate, up, act)
    if is_packed(gate) and is_packed(up) and 0 < x.shape[0] <= MAX_ROWS:
        return gated_packed(x, gate, up, act)
    return reference.activate(linear(x, gate), linear(x, up), act)


def product(x: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """x W^T of one dtype with sums and result in float32; x: [T, K] -> float32 [T, N]."""
    w = weight.parts["data"].T
    if x.dtype == torch.float32:
        return torch.mm(x, w)
    if x.is_cuda:
        return torch.mm(x, w, out_dtype=torch.float32)
    return torch.mm(x.float(), w.float())  # torch has no such product on the CPU: its twin


def product_expanded(x: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """``product`` with a packed matrix, rounded to bfloat16 band by band: float32 [T, N]."""
    x = x.to(torch.bfloat16)
    outs = [
        product(x, PackedTensor("bf16", band.shape, {"data": expanded(band)}))
        for band in bands(weight)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _few(x: torch.Tensor, weights: Sequence[PackedTensor]) -> bool:
    return 0 < x.shape[0] <= MAX_ROWS and all(w.format in _HALVES for w in weights)
