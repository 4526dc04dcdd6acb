"""From what the engine runs to what a plan counts: ``ModelSpec`` to ``PlanSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from headrace.core.model_spec import ModelSpec
from headrace.core.plan_spec import AttentionKind, PlanSpec
from headrace.core.weight_shapes import attention_shapes, dense_shapes, expert_shapes, router_shapes


def plan_spec_of(
    spec: ModelSpec, stored_bits: Mapping[str, float] | None = None, name: str = ""
) -> PlanSpec:
    """The same model as a plan sees it.

    Args:
        stored_bits: bits a weight of each kind (``checkpoint.kinds.stored_bits``); bfloat16 if not given.
    """
    windows = [layer.window for layer in spec.layers]
    shapes = attention_shapes(spec)
    moe = spec.moe
    mixtures = sum(layer.moe for layer in spec.layers) if moe else 0
    kinds = tuple(
        AttentionKind(
            name="full" if window is None else "window",
            layers=windows.count(window),
            qkv_weights=sum(prod(shapes[n]) for n in ("q", "k", "v")),
            o_weights=prod(shapes["o"]),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            score_dim=spec.head_dim,
            value_dim=spec.head_dim,
            cached=2 * spec.num_kv_heads * spec.head_dim,
            window=window,
        )
        for window in dict.fromkeys(windows)
    )
    biases = 0
    if moe is not None and moe.expert_bias:
        stacked = expert_shapes(spec, moe)
        biases = sum(prod(s[1:]) for n, s in stacked.items() if n.endswith("_bias"))
    return PlanSpec(
        name=name or spec.family,
        family=spec.family,
        hidden=spec.hidden,
        vocab=spec.vocab,
        max_context=spec.max_context,
        attention=kinds,
        dense_layers=spec.num_layers - mixtures,
        dense_weights=sum(prod(shape) for shape in dense_shapes(spec).values()),
        moe_layers=mixtures,
        num_experts=moe.num_experts if moe else 0,
        num_experts_per_token=moe.num_experts_per_token if moe else 0,
        expert_weights=3 * spec.hidden * moe.intermediate if moe else 0,
        expert_biases=biases,
        router_weights=prod(router_shapes(spec, moe)["router"]) if moe else 0,
        tied=spec.tie_embeddings,
        stored_bits=dict(stored_bits or {}),
    )
