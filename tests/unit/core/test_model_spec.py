"""Published configurations, with the values and sizes worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.model_spec import ModelSpec
from headrace.core.weight_shapes import num_active_parameters, num_parameters

GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}


def test_gpt_oss_120b() -> None:
    spec = ModelSpec.from_config(GPT_OSS_120B)
    assert (spec.num_layers, spec.hidden, spec.head_dim) == (36, 2880, 64)
    assert (spec.num_heads, spec.num_kv_heads) == (64, 8)
    assert [layer.window for layer in spec.layers] == [128, None] * 18
    assert all(layer.moe for layer in spec.layers)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_token) == (128, 4)
    assert spec.moe.scoring == "topk_softmax"
    assert spec.moe.gate_up_interleaved
    assert (spec.rope.scaling, spec.rope.factor, spec.rope.original_context) == ("yarn", 32.0, 4096)
    assert not spec.rope.truncate
    assert spec.sinks
    assert spec.eos_token_ids == (200002,)
    # Two vectors of 8 heads of 64 in each of 36 layers.
    assert spec.kv_nbytes_per_token(2) == 2 * 8 * 64 * 36 * 2
    counts = num_parameters(spec)
    assert counts.embedding == counts.lm_head == 201088 * 2880
    # One expert: 2880 x 2880 three times, and three biases.
    assert counts.experts == 36 * 128 * (3 * 2880 * 2880 + 3 * 2880)
    assert counts.router == 36 * (128 * 2880 + 128)
    attention = 2880 * 4096 + 2 * 2880 * 512 + 4096 * 2880 + (4096 + 512 + 512 + 2880) + 64
    assert counts.attention == 36 * attention
    # The model card: 116.83 B parameters, 5.13 B active.
    assert counts.total / 1e9 == pytest.approx(116.83, abs=0.005)
    assert num_active_parameters(spec) / 1e9 == pytest.approx(5.13, abs=0.005)


def test_qwen3_30b_a3b() -> None:
    spec = ModelSpec.from_config(QWEN3_30B_A3B)
    assert spec.qk_norm == "head"
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.intermediate, spec.moe.normalize) == (128, 768, True)
    assert {layer.window for layer in spec.layers} == {None}
    counts = num_parameters(spec)
    assert counts.experts == 48 * 128 * 3 * 768 * 2048
    assert counts.attention == 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128)
    assert counts.dense_ffn == 0
    assert counts.total == 30_532_122_624  # published: 30.5 B


def test_mixtral_8x7b() -> None:
    spec = ModelSpec.from_config(MIXTRAL_8X7B)
    assert spec.head_dim == 128
    assert spec.moe is not None
    assert spec.moe.normalize
    assert num_parameters(spec).total == 46_702_792_704  # published: 46.7 B


def test_llama_31_8b() -> None:
    spec = ModelSpec.from_config(LLAMA_31_8B)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert (spec.rope.scaling, spec.rope.factor) == ("llama3", 8.0)
    assert (spec.rope.low_freq_factor, spec.rope.high_freq_factor) == (1.0, 4.0)
    assert num_parameters(spec).total == 8_030_261_248  # published: 8.03 B
    assert num_parameters(spec).dense_ffn == 32 * 3 * 4096 * 14336


def test_olmoe_1b_7b() -> None:
    spec = ModelSpec.from_config(OLMOE_1B_7B)
    assert spec.qk_norm == "full"
    assert spec.moe is not None
    assert not spec.moe.normalize
    assert num_parameters(spec).total == 6_919_161_856  # published: 6.92 B


def test_spec_is_plain_data() -> None:
    spec = ModelSpec.from_config(GPT_OSS_120B)
    assert json.loads(json.dumps(dataclasses.asdict(spec)))["moe"]["num_experts"] == 128


def test_both_spellings_of_rope_agree() -> None:
    older = ModelSpec.from_config(LLAMA_31_8B)
    config = dict(LLAMA_31_8B)
    nested = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    assert ModelSpec.from_config({**config, "rope_parameters": nested}) == older
    # The oldest files say "type".
    aliased = dict(LLAMA_31_8B["rope_scaling"])
    aliased["type"] = aliased.pop("rope_type")
    assert ModelSpec.from_config({**LLAMA_31_8B, "rope_scaling": aliased}) == older


def test_qwen3_moe_dense_layers() -> None:
    spec = ModelSpec.from_config(
        {**QWEN3_30B_A3B, "mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4}
    )
    # Layers 1 and 3 are every second one; layer 1 is listed as dense.
    assert [layer.moe for layer in spec.layers] == [False, False, False, True]


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLAMA_31_8B, "attn_logit_softcapping", 50.0),
        (LLAMA_31_8B, "mlp_bias", True),
        (LLAMA_31_8B, "hidden_act", "gelu"),
        (LLAMA_31_8B, "partial_rotary_factor", 0.5),
        (LLAMA_31_8B, "sliding_window", 4096),
        (LLAMA_31_8B, "a_key_of_tomorrow", "x"),
        (OLMOE_1B_7B, "clip_qkv", 8.0),
        (MIXTRAL_8X7B, "hidden_act", "relu"),
        (GPT_OSS_120B, "initial_context_length", 8192),
        (QWEN3_30B_A3B, "shared_expert_intermediate_size", 768),
        (LLAMA_31_8B, "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        (LLAMA_31_8B, "rope_scaling", {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}),
        (LLAMA_31_8B, "rope_scaling", {"rope_type": "linear", "factor": 2.0, "beta_fast": 4}),
        (LLAMA_31_8B, "architectures", ["MambaForCausalLM"]),
    ],
)
def test_unknown_numerics_are_refused(base: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelSpec.from_config({**base, key: value})
    named = value["rope_type"] if key == "rope_scaling" and value["rope_type"] == "dynamic" else key
    if key == "rope_scaling" and "mscale" in value:
        named = "mscale"
    if key == "rope_scaling" and "beta_fast" in value:
        named = "beta_fast"
    if key == "architectures":
        named = "MambaForCausalLM"
    assert named in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", None),
        ("partial_rotary_factor", 1.0),
        ("use_qk_norm", False),
        ("pruned_heads", {}),
        ("torch_dtype", "bfloat16"),
        ("_name_or_path", "somewhere"),
    ],
)
def test_switched_off_keys_are_accepted(key: str, value: Any) -> None:
    assert ModelSpec.from_config({**LLAMA_31_8B, key: value}) == ModelSpec.from_config(LLAMA_31_8B)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLAMA_31_8B, "hidden_size", None),
        (LLAMA_31_8B, "hidden_size", "4096"),
        (LLAMA_31_8B, "hidden_size", 0),
        (LLAMA_31_8B, "num_key_value_heads", 7),
        (LLAMA_31_8B, "rms_norm_eps", float("nan")),
        (LLAMA_31_8B, "vocab_size", True),
        (LLAMA_31_8B, "eos_token_id", "end"),
        (LLAMA_31_8B, "tie_word_embeddings", 1),
        (GPT_OSS_120B, "layer_types", ["full_attention"]),
        (GPT_OSS_120B, "experts_per_token", 8),
        (GPT_OSS_120B, "rope_scaling", None),
        (MIXTRAL_8X7B, "num_experts_per_tok", 9),
    ],
)
def test_impossible_values_name_the_key(base: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSpec.from_config({**base, key: value})
    assert key in caught.value.message
    assert caught.value.hint


def test_contradicting_rope_is_an_error() -> None:
    with pytest.raises(ConfigError, match="contradicts"):
        ModelSpec.from_config({**LLAMA_31_8B, "rope_parameters": {"rope_theta": 1e4}})
