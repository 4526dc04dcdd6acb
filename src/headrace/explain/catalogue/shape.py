"""Symbols of the catalogue from a model's description."""

from __future__ import annotations

from headrace.core.plan_spec import AttentionKind, PlanSpec

_DENSE = ("dense", "shared", "router")


def values_of_plan(spec: PlanSpec) -> dict[str, float]:
    """The model's symbols, with the bytes of its formats.

    Widths that the description has only as products come out as such: what one dense feed-forward or
    expert has of weights is right, and so is what a layer's projections have. Attention whose keys are not
    as wide as its values takes the mean of both as a head's width, so that operations and cached bytes are
    right; of one vector for both the values have what is left. Layers without a cache are the recurrent
    ones, and their state is an inner width times a state.
    """
    weights, nbytes = spec.weights(), spec.nbytes()
    first = _first(spec)
    attending = [kind for kind in spec.attention if not kind.state]
    windows = [kind for kind in attending if kind.window is not None]
    recurrent = [kind for kind in spec.attention if kind.state]
    layers = sum(kind.layers for kind in attending)
    head = "embedding" if spec.tied else "lm_head"
    found: dict[str, float] = {
        "d": spec.hidden,
        "n_attn": layers - sum(kind.layers for kind in windows),
        "n_swa": sum(kind.layers for kind in windows),
        "n_ssm": sum(kind.layers for kind in recurrent),
        "win": max((kind.window or 0 for kind in windows), default=4096),
        "n_q": first.heads,
        "n_kv": first.kv_heads,
        "d_h": (first.score_dim + first.value_dim) / 2,
        "I": spec.dense_weights / (3 * spec.hidden),
        "n_ffn": spec.dense_layers,
        "n_moe": spec.moe_layers,
        "I_e": spec.expert_weights / (3 * spec.hidden),
        "E": spec.num_experts,
        "topk": spec.num_experts_per_token,
        "n_shared": spec.shared_weights / spec.expert_weights if spec.expert_weights else 0,
        "V": spec.vocab,
        "tied": float(spec.tied),
        "wa_b": spec.bits("attention") / 8,
        "w_b": sum(nbytes[kind] for kind in _DENSE) / sum(weights[kind] for kind in _DENSE),
        "we_b": spec.bits("experts") / 8,
        "h_b": spec.bits(head) / 8,
    }
    width = found["d_h"]
    own = {  # given only where heads do not tell, so that another number of heads changes what it should
        "qkv_own": sum(kind.layers * kind.qkv_weights for kind in attending) / max(layers, 1),
        "o_own": sum(kind.layers * kind.o_weights for kind in attending) / max(layers, 1),
    }
    heads = {"qkv_own": first.heads + 2 * first.kv_heads, "o_own": first.heads}
    found |= {n: v for n, v in own.items() if v != heads[n] * width * spec.hidden}
    if first.cached != 2 * first.kv_heads * width:
        # bfloat16, as the symbols' own example: what is kept beyond the keys' width stands as values
        found |= {"k_b": 2, "v_b": 2 * first.cached / (first.kv_heads * width) - 2}
    if recurrent:
        found |= {
            "d_inner": recurrent[0].heads * recurrent[0].value_dim,
            "d_state": recurrent[0].score_dim,
            "ssm_own": recurrent[0].qkv_weights + recurrent[0].o_weights,
        }
    return found | _latent_values(spec, first)


def not_said(spec: PlanSpec) -> str:
    """What of the model's attention the symbols cannot say, as the end of a sentence; empty if nothing."""
    if any(kind.stride > 1 for kind in spec.attention):
        return "cached keys counted as if none were compressed"
    if any(kind.top_keys is not None for kind in spec.attention):
        return "attention counted as if every key were chosen"
    return ""


def _first(spec: PlanSpec) -> AttentionKind:
    """The attention whose heads stand for all: the first with a cache."""
    return next((kind for kind in spec.attention if kind.cached), spec.attention[0])


def _latent_values(spec: PlanSpec, kind: AttentionKind) -> dict[str, float]:
    """Symbols of latent attention and of an index, for models that have them."""
    found: dict[str, float] = {}
    if kind.nope_dim:
        found |= {
            "r_kv": kind.value_dim,
            "r_rope": kind.score_dim - kind.value_dim,
            "d_nope": kind.nope_dim,
            "d_v": kind.o_weights / (kind.heads * spec.hidden),
        }
    if kind.index_heads:
        found |= {
            "h_idx": kind.index_heads,
            "d_idx": kind.index_cached,
            "keep": float(kind.top_keys or 0),
        }
    return found
