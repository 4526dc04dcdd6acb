"""Which weights a model has and how large they are, from its ``ModelSpec`` alone.

The loader checks a checkpoint against these shapes; the planner adds them up before any download.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from headrace.core.model_spec import ModelSpec, MoeSpec


@dataclass(frozen=True)
class ParameterCounts:
    """Weights by kind, in elements. A tied output head is counted once, as embedding.

    ``attention`` includes biases, sinks and query/key norms; ``norm`` the layers' and the last one.
    """

    embedding: int
    lm_head: int
    attention: int
    dense_ffn: int
    experts: int
    router: int
    norm: int

    @property
    def total(self) -> int:
        return (
            self.embedding
            + self.lm_head
            + self.attention
            + self.dense_ffn
            + self.experts
            + self.router
            + self.norm
        )


def core_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights outside the layers, by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.vocab, spec.hidden),
        "final_norm": (spec.hidden,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab, spec.hidden)
    return shapes


def attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's attention; names without ``layers.{i}.``."""
    q_rows = spec.num_heads * spec.head_dim
    kv_rows = spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q": (q_rows, spec.hidden),
        "k": (kv_rows, spec.hidden),
        "v": (kv_rows, spec.hidden),
        "o": (spec.hidden, q_rows),
    }
    if spec.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if spec.o_bias:
        shapes["o_bias"] = (spec.hidden,)
    if spec.qk_norm == "head":
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    elif spec.qk_norm == "full":
        shapes |= {"q_norm": (q_rows,), "k_norm": (kv_rows,)}
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,)
    return shapes


def norm_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's norms of the residual stream; names without ``layers.{i}.``."""
    names = ["attn_norm", "ffn_norm"]
    if spec.post_norms:
        names += ["attn_post_norm", "ffn_post_norm"]
    return dict.fromkeys(names, (spec.hidden,))


def dense_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's dense feed-forward."""
    inner = (spec.intermediate, spec.hidden)
    return {"gate": inner, "up": inner, "down": (spec.hidden, spec.intermediate)}


def expert_shapes(spec: ModelSpec, moe: MoeSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's stacked experts: [experts, rows, columns], biases [experts, rows]."""
    inner = (moe.num_experts, moe.intermediate, spec.hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "experts.gate": inner,
        "experts.up": inner,
        "experts.down": (moe.num_experts, spec.hidden, moe.intermediate),
    }
    if moe.expert_bias:
        shapes |= {f"{name}_bias": shape[:2] for name, shape in shapes.items()}
    return shapes


def router_shapes(spec: ModelSpec, moe: MoeSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's router."""
    shapes: dict[str, tuple[int, ...]] = {"router": (moe.num_experts, spec.hidden)}
    if moe.router_bias:
        shapes["router_bias"] = (moe.num_experts,)
    return shapes


def num_parameters(spec: ModelSpec) -> ParameterCounts:
    """Count the weights of the whole model by kind."""
    mixtures = sum(layer.moe for layer in spec.layers)
    moe = spec.moe
    core = core_shapes(spec)
    return ParameterCounts(
        embedding=prod(core["embed"]),
        lm_head=prod(core["lm_head"]) if "lm_head" in core else 0,
        attention=spec.num_layers * _total(attention_shapes(spec)),
        dense_ffn=(spec.num_layers - mixtures) * _total(dense_shapes(spec)),
        experts=mixtures * _total(expert_shapes(spec, moe)) if moe else 0,
        router=mixtures * _total(router_shapes(spec, moe)) if moe else 0,
        norm=spec.num_layers * _total(norm_shapes(spec)) + spec.hidden,
    )


def num_active_parameters(spec: ModelSpec) -> int:
    """Weights that one token reads: chosen experts only, one row of a separate embedding."""
    counts = num_parameters(spec)
    total = counts.total
    if not spec.tie_embeddings:
        total -= counts.embedding - spec.hidden
    if spec.moe:
        per_expert = counts.experts // spec.moe.num_experts
        total -= per_expert * (spec.moe.num_experts - spec.moe.num_experts_per_token)
    return total


def _total(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes.values())
