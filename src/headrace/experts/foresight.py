"""A layer's routing, guessed before its attention: the router's choice for the state as it is then.

Attention moves the state little against what all layers before have added to it, so the first choice of
such a guess is mostly right (docs/adr/0006). The plain twin of ``ops.triton.expert_foresight``.
"""

from __future__ import annotations

import torch

from headrace.ops.expert_records import RouterView

FORMATS = ("f32", "f16", "bf16")  # of routers that can be asked


def guess(x: torch.Tensor, router: RouterView) -> torch.Tensor:
    """x: float32 [T, D], before the norm that the router stands behind. Returns its logits, [T, E]."""
    mean = x.square().mean(-1, keepdim=True)
    normed = x / torch.sqrt(mean + router.eps) * router.scale
    logits = normed @ router.weight.parts["data"].float().T
    return logits if router.bias is None else logits + router.bias


def surest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32 [T, k], the surest expert first, the smaller one among equals."""
    return logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k].int()
