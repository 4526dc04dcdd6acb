"""Symbols of the catalogue from a model's description."""

from __future__ import annotations

from headrace.core.model_spec import ModelSpec
from headrace.core.plan_spec import PlanSpec


def values_of(spec: ModelSpec, weight_nbytes: float = 2.0) -> dict[str, float]:
    """The model's symbols. ``weight_nbytes``: bytes of a weight on average, scales included."""
    mixtures = sum(layer.moe for layer in spec.layers)
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    moe = spec.moe
    return {
        "d": spec.hidden,
        "n_attn": spec.num_layers - len(windows),
        "n_swa": len(windows),
        "win": max(windows, default=4096),
        "n_q": spec.num_heads,
        "n_kv": spec.num_kv_heads,
        "d_h": spec.head_dim,
        "I": spec.intermediate,
        "n_ffn": spec.num_layers - mixtures,
        "n_moe": mixtures,
        "I_e": moe.intermediate if moe else 0,
        "E": moe.num_experts if moe else 0,
        "topk": moe.num_experts_per_token if moe else 0,
        "V": spec.vocab,
        "tied": float(spec.tie_embeddings),
        "w_b": weight_nbytes,
        "we_b": weight_nbytes,
        "h_b": weight_nbytes,
    }


def values_of_plan(spec: PlanSpec) -> dict[str, float]:
    """The symbols of a model for planning, with the bytes of its formats.

    Widths that the description has only as products come out as such: what one dense feed-forward or
    expert has of weights is right. Latent and other attentions that symbols cannot say take the
    sizes of what they multiply and keep: keys and values that are one vector are counted as keys. Layers
    without a cache are the recurrent ones, and their state is an inner width times a state.
    """
    first = next((kind for kind in spec.attention if kind.cached), spec.attention[0])
    windows = [kind for kind in spec.attention if kind.window is not None]
    recurrent = [kind for kind in spec.attention if kind.state]
    layers = sum(kind.layers for kind in spec.attention if not kind.state)
    found: dict[str, float] = {}
    if first.cached != 2 * first.kv_heads * first.value_dim:
        # bfloat16, as the symbols' own example
        found |= {"k_b": 2 * first.cached / (first.kv_heads * first.value_dim), "v_b": 0}
    if recurrent:
        found |= {
            "d_inner": recurrent[0].heads * recurrent[0].value_dim,
            "d_state": recurrent[0].score_dim,
        }
    return found | {
        "d": spec.hidden,
        "n_attn": layers - sum(kind.layers for kind in windows),
        "n_swa": sum(kind.layers for kind in windows),
        "n_ssm": sum(kind.layers for kind in recurrent),
        "win": max((kind.window or 0 for kind in windows), default=4096),
        "n_q": first.heads,
        "n_kv": first.kv_heads,
        "d_h": first.value_dim,
        "I": spec.dense_weights / (3 * spec.hidden),
        "n_ffn": spec.dense_layers,
        "n_moe": spec.moe_layers,
        "I_e": spec.expert_weights / (3 * spec.hidden),
        "E": spec.num_experts,
        "topk": spec.num_experts_per_token,
        "n_shared": spec.shared_weights / spec.expert_weights if spec.expert_weights else 0,
        "V": spec.vocab,
        "tied": float(spec.tied),
        "w_b": spec.bits("attention") / 8,
        "we_b": spec.bits("experts") / 8,
        "h_b": spec.bits("embedding" if spec.tied else "lm_head") / 8,
    }
