"""Symbols of the catalogue from a model's description."""

from __future__ import annotations

from headrace.core.model_spec import ModelSpec


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
