"""Mixtures as their makers write them, against the sizes that they publish."""

from __future__ import annotations

import pytest

from headrace.core.config_library import bundled_model
from headrace.core.errors import UnsupportedModelError
from headrace.core.plan_reading import spec_from_config

LLAMA_4 = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "vocab_size": 103424,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "moe_num_experts": 64,
    "moe_k": 8,
    "moe_intermediate_size": 3584,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 53,
    "moe_num_shared_experts": 0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
KIMI_K2_THINKING = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (LLAMA_4, 400e9, 17e9),  # Maverick: every other layer has 128 experts and a shared one
        (
            {**LLAMA_4, "num_local_experts": 16, "interleave_moe_layer_step": 1},
            109e9,
            17e9,
        ),  # Scout
        (ERNIE, 300e9, 47e9),  # ERNIE-4.5-300B-A47B: three dense layers first
    ],
)
def test_published_sizes(config, total, active):
    spec = spec_from_config(config)
    assert spec.total_weights == pytest.approx(total, rel=0.02)
    assert spec.active_weights == pytest.approx(active, rel=0.06)
    assert spec.notes == ()


def test_a_published_file_of_whole_numbers():
    """Kimi K2 Thinking is 594 GB: experts of 4 bits with a scale for 32, the rest in bfloat16."""
    spec = spec_from_config(KIMI_K2_THINKING)
    assert spec.bits("experts") == 4.5
    assert spec.bits("attention") == spec.bits("shared") == spec.bits("dense") == 16
    assert spec.weights_nbytes == pytest.approx(594e9, rel=2e-3)


def test_layers_by_lists():
    """Dense layers as words or as numbers; MiniMax-M2 says of every layer that it attends to everything."""
    base = {k: v for k, v in ERNIE.items() if not k.startswith("moe_layer")}
    words = ["dense"] * 3 + ["sparse"] * 51
    numbers = [int(word == "sparse") for word in words]
    for change in ({"mlp_layer_types": words}, {"moe_layer_freq": numbers}):
        spec = spec_from_config({**base, **change})
        assert (spec.dense_layers, spec.moe_layers) == (3, 51)
    assert spec_from_config({**base, "moe_layer_freq": 1}).moe_layers == 54
    assert spec_from_config({**base, "attn_type_list": [1] * 54}).num_layers == 54
    with pytest.raises(UnsupportedModelError, match="attn_type_list"):
        spec_from_config({**base, "attn_type_list": [0, 1] * 27})


def test_layers_with_an_index_of_their_own_are_counted():
    """GLM-5.2: the first three, then every fourth of 78 (6, 10, ..., 74)."""
    config = dict(bundled_model("glm-5.2").config)
    listed = ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3
    for spec in (spec_from_config(config), spec_from_config({**config, "indexer_types": listed})):
        assert {kind.name: kind.layers for kind in spec.attention} == {
            "latent-indexed": 21,
            "latent-shared-index": 57,
        }


def test_llama_4_sees_chunks_in_three_layers_of_four():
    token = 2 * 8 * 128 * 2  # keys and values of 8 heads of 128, two bytes
    spec = spec_from_config(LLAMA_4)
    assert spec.kv_nbytes(100_000, 16) == (36 * 8192 + 12 * 100_000) * token
    listed = {**LLAMA_4, "no_rope_layers": [1, 0] * 24}
    assert spec_from_config(listed).kv_nbytes(100_000, 16) == 24 * (8192 + 100_000) * token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_num_experts": None, "num_big_experts": 64}, "num_big_experts is 64"),
        ({"hybrid_override_pattern": "MEM*"}, "has hybrid_override_pattern"),
        ({"layers_block_type": ["mamba"] * 54}, "has layers_block_type"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "has linear_attn_config"),
    ],
)
def test_what_would_be_miscounted_is_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        spec_from_config({**ERNIE, **change})
