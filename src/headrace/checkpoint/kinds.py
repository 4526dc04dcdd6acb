"""Which kind of weights a tensor is, and how many bits a checkpoint spends on each kind."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from headrace.checkpoint.records import RawTensor
from headrace.core.plan_spec import KINDS


def kind_of(name: str) -> str | None:
    """The kind of a canonical tensor name; None for biases and what a plan does not count."""
    last = name.split(".")[-1]
    if name in ("embed", "lm_head"):
        return {"embed": "embedding"}.get(name, name)
    if ".experts." in name:
        return None if last.endswith("_bias") else "experts"
    if last in ("q", "k", "v", "o"):
        return "attention"
    if last in ("gate", "up", "down"):
        return "dense"
    return "router" if last == "router" else None


def stored_bits(tensors: Iterable[RawTensor]) -> dict[str, float]:
    """Bits a weight of each kind, scales included: the mean over the kind's tensors."""
    nbytes, weights = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        kind = kind_of(tensor.name)
        if kind is not None:
            nbytes[kind] += sum(part.nbytes for part in tensor.parts.values())
            weights[kind] += prod(tensor.shape)
    return {kind: 8 * nbytes[kind] / weights[kind] for kind in KINDS if weights[kind]}
