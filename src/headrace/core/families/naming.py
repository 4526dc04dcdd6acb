"""Stored tensor names that several families share; the right side is the canonical name."""

from __future__ import annotations

from collections.abc import Mapping

_HF = "model.layers.{i}."
_OURS = "layers.{i}."


def _layer(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {prefix + stored: _OURS + ours for stored, ours in names.items()}


HF_CORE: dict[str, str] = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
    **_layer(
        {
            "input_layernorm.weight": "attn_norm",
            "post_attention_layernorm.weight": "ffn_norm",
            "self_attn.q_proj.weight": "q",
            "self_attn.k_proj.weight": "k",
            "self_attn.v_proj.weight": "v",
            "self_attn.o_proj.weight": "o",
            # Old Llama checkpoints carry the frequencies that theta already gives.
            "self_attn.rotary_emb.inv_freq": "rope_inv_freq",
        },
        _HF,
    ),
}

HF_ATTENTION_BIAS = _layer(
    {f"self_attn.{x}_proj.bias": f"{x}_bias" for x in ("q", "k", "v", "o")}, _HF
)

HF_QK_NORM = _layer({"self_attn.q_norm.weight": "q_norm", "self_attn.k_norm.weight": "k_norm"}, _HF)

HF_DENSE = _layer({f"mlp.{x}_proj.weight": x for x in ("gate", "up", "down")}, _HF)

# One expert at a time, as published; stacked with gate and up joined, as transformers 5 holds them.
HF_EXPERTS = _layer(
    {
        "mlp.gate.weight": "router",
        **{
            f"mlp.experts.{{e}}.{x}_proj.weight": f"experts.{{e}}.{x}"
            for x in ("gate", "up", "down")
        },
        "mlp.experts.gate_up_proj": "experts.gate_up",
        "mlp.experts.down_proj": "experts.down",
    },
    _HF,
)

GGUF_CORE: dict[str, str] = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
    **_layer(
        {
            "attn_norm.weight": "attn_norm",
            "attn_q.weight": "q",
            "attn_k.weight": "k",
            "attn_v.weight": "v",
            "attn_output.weight": "o",
        },
        "blk.{i}.",
    ),
}

GGUF_FFN_NORM = _layer({"ffn_norm.weight": "ffn_norm"}, "blk.{i}.")

GGUF_QK_NORM = _layer({"attn_q_norm.weight": "q_norm", "attn_k_norm.weight": "k_norm"}, "blk.{i}.")

GGUF_DENSE = _layer({f"ffn_{x}.weight": x for x in ("gate", "up", "down")}, "blk.{i}.")

GGUF_EXPERTS = _layer(
    {
        "ffn_gate_inp.weight": "router",
        **{f"ffn_{x}_exps.weight": f"experts.{x}" for x in ("gate", "up", "down")},
    },
    "blk.{i}.",
)

GGUF_BIASES = _layer(
    {
        "attn_q.bias": "q_bias",
        "attn_k.bias": "k_bias",
        "attn_v.bias": "v_bias",
        "attn_output.bias": "o_bias",
        "ffn_gate_inp.bias": "router_bias",
        **{f"ffn_{x}_exps.bias": f"experts.{x}_bias" for x in ("gate", "up", "down")},
    },
    "blk.{i}.",
)
