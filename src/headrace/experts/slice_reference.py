"""Slices of experts in plain PyTorch: the twin of ``ops.cpu.expert_service.run_now``."""

from __future__ import annotations

import torch

from headrace.experts.items import Items
from headrace.experts.slab import SlabLayout
from headrace.experts.slab_pack import slice_weights
from headrace.formats.base import dequantize
from headrace.ops.records import Activation, ExpertWeights


def run_items(
    layout: SlabLayout,
    slabs: torch.Tensor,
    act: Activation,
    x: torch.Tensor,
    work: Items,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The sum over items of weight * partial output.

    slabs: uint8 [experts, num_slices, slice_nbytes]; x: float [T, hidden]. Computes in ``dtype``, and
    returns it: [T, hidden], zeros where a token has no item.
    """
    x = x.to(dtype)
    out = torch.zeros_like(x)
    for expert, index, first, pairs in work.items.numpy().tolist():
        token = work.pair_token[first : first + pairs].long()
        weight = work.pair_weight[first : first + pairs].to(dtype)
        part = slice_weights(slabs[expert], layout, index)
        out.index_add_(0, token, slice_output(part, act, x[token]) * weight[:, None])
    return out


def slice_output(part: ExpertWeights, act: Activation, x: torch.Tensor) -> torch.Tensor:
    """What one slice (``slab_pack.slice_weights``) adds for x [n, hidden], in x's dtype."""
    gate = x @ dequantize(part.gate[0]).to(x.dtype).T
    up = x @ dequantize(part.up[0]).to(x.dtype).T
    if part.gate_bias is not None and part.up_bias is not None:
        gate += part.gate_bias[0].to(x.dtype)
        up += part.up_bias[0].to(x.dtype)
    if act.kind == "silu":
        between = torch.nn.functional.silu(gate) * up
    else:
        gate = gate.clamp(max=act.limit)
        between = gate * torch.sigmoid(act.alpha * gate) * (up.clamp(-act.limit, act.limit) + 1)
    out = between @ dequantize(part.down[0]).to(x.dtype).T
    return out if part.down_bias is None else out + part.down_bias[0].to(x.dtype)
