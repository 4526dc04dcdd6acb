"""Bytes and weights of models, added up by hand and compared with published figures."""

from __future__ import annotations

import pytest

from headrace.core.config_library import bundled_model, bundled_names
from headrace.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from headrace.core.model_spec import ModelSpec
from headrace.core.plan_bridge import plan_spec_of
from headrace.core.plan_reading import spec_from_config
from headrace.core.plan_spec import AttentionKind
from headrace.core.weight_shapes import num_active_parameters, num_parameters
from tests.fixtures.llama_config import LLAMA_8B


def test_gpt_oss_120b_by_hand():
    spec = bundled_model("gpt-oss-120b").spec()
    # q: 64 heads of 64, k and v: 8 of 64, o back: (4096 + 2 * 512 + 4096) * 2880
    attention = 36 * (4096 + 1024 + 4096) * 2880
    experts = 36 * 128 * 3 * 2880 * 2880
    assert spec.weights()["attention"] == attention
    assert spec.weights()["experts"] == experts
    assert spec.weights()["embedding"] == spec.weights()["lm_head"] == 201088 * 2880
    assert spec.expert_nbytes == 3 * 2880 * 2880 * 17 // 32 + (2 * 2880 + 2880) * 2  # 13,236,480
    # model card: 116.83 billion in all (biases, sinks and norms included), 5.13 a token
    assert spec.total_weights == pytest.approx(116.83e9, rel=1e-3)
    assert spec.active_weights == pytest.approx(5.13e9, rel=3e-3)
    # the checkpoint on disk is 60.8 GiB
    assert spec.weights_nbytes / 2**30 == pytest.approx(60.8, rel=3e-3)


def test_qwen3_30b_a3b_by_hand():
    spec = bundled_model("qwen3-30b-a3b").spec()
    attention = 48 * (32 * 128 + 2 * 4 * 128 + 32 * 128) * 2048
    experts = 48 * 128 * 3 * 2048 * 768
    router = 48 * 128 * 2048
    total = attention + experts + router + 2 * 151936 * 2048 + (2 * 48 + 1) * 2048
    assert spec.total_weights == total
    assert total == pytest.approx(30.53e9, rel=1e-3)  # model card: 30.5B
    assert spec.expert_nbytes == 2 * 3 * 2048 * 768
    assert spec.weights_nbytes == 2 * total
    # cache: 48 layers, keys and values of 4 heads of 128, two bytes
    assert spec.kv_nbytes(1000, 16) == 1000 * 48 * 2 * 4 * 128 * 2


def test_llama_3_8b_by_hand():
    spec = bundled_model("llama-3-8b").spec()
    layer = (4096 + 2 * 1024 + 4096) * 4096 + 3 * 4096 * 14336
    total = 32 * layer + 2 * 128256 * 4096 + 65 * 4096
    assert spec.total_weights == total == 8_030_261_248  # as published
    assert spec.weights_nbytes == 16_060_522_496  # the four files of the checkpoint
    assert spec.kv_nbytes(1, 16) == 131_072


def test_windows_keep_only_what_they_see():
    spec = bundled_model("gpt-oss-20b").spec()
    token = 2 * 8 * 64 * 2
    assert spec.kv_nbytes(100, 16) == 24 * 100 * token
    assert spec.kv_nbytes(10_000, 16) == 12 * 10_000 * token + 12 * 128 * token


def test_latent_attention_keeps_one_vector():
    spec = bundled_model("deepseek-v3").spec()
    assert spec.kv_nbytes(1, 16) == 61 * (512 + 64) * 2  # 70,272 bytes, as DeepSeek-V3 is known for
    assert spec.total_weights == pytest.approx(671e9, rel=2e-3)
    assert spec.active_weights == pytest.approx(37e9, rel=0.02)


def test_linear_attention_keeps_a_state():
    spec = bundled_model("qwen3.6-35b-a3b").spec()
    full = 10 * 2 * 2 * 256 * 2
    assert spec.kv_nbytes(2000, 16) - spec.kv_nbytes(1000, 16) == 1000 * full
    assert spec.kv_nbytes(1, 16) > 30 * 32 * 128 * 128 * 4  # 30 layers' states in float32


def test_compressed_attention_keeps_few_keys():
    spec = bundled_model("deepseek-v4-flash").spec()
    # 21 layers at 4:1 with an index of 128, 20 at 128:1, 512 elements a key; windows of 128 besides
    grown = spec.kv_nbytes(1_000_448, 16) - spec.kv_nbytes(448, 16)
    tokens = 1_000_000
    assert grown == pytest.approx(2 * tokens * (21 * (512 + 128) / 4 + 20 * 512 / 128), rel=1e-3)


@pytest.mark.parametrize("name", bundled_names())
def test_every_bundled_model_has_its_published_size(name):
    model = bundled_model(name)
    spec = model.spec()
    # Names of sizes are rounded to whole billions; GLM-4.7 and 5.2 count their extra heads.
    assert spec.total_weights == pytest.approx(model.published["parameters"], rel=0.02)
    if "checkpoint_nbytes" in model.published:
        assert spec.file_nbytes == pytest.approx(model.published["checkpoint_nbytes"], rel=0.06)
    if spec.sparse:
        assert spec.active_weights == pytest.approx(model.published["active_parameters"], rel=0.10)


QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def test_agrees_with_what_the_engine_loads():
    ours, engines = spec_from_config(QWEN), ModelSpec.from_config(QWEN)
    counts = num_parameters(engines)
    found = ours.weights()
    assert found["experts"] == counts.experts
    assert found["router"] == counts.router
    assert found["dense"] == counts.dense_ffn
    assert found["embedding"] == counts.embedding
    assert found["lm_head"] == counts.lm_head == 0
    assert found["attention"] == counts.attention - 5 * 2 * 16  # without the norms of q and k
    assert ours.active_weights == num_active_parameters(engines) - 5 * 2 * 16


def test_the_engines_record_becomes_the_plans():
    for config in (QWEN, {**bundled_model("gpt-oss-20b").config, **YARN}):
        ours = spec_from_config(config)
        bridged = plan_spec_of(ModelSpec.from_config(config))
        assert bridged.weights() == ours.weights()
        assert bridged.kv_nbytes(5000, 16) == ours.kv_nbytes(5000, 16)
        assert bridged.expert_biases == ours.expert_biases
        assert set(bridged.attention) == set(ours.attention)


YARN = {
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "hidden_act": "silu",
}


def test_refuses_what_it_cannot_count():
    with pytest.raises(ConfigError, match="hidden_size"):
        spec_from_config({"model_type": "llama"})
    with pytest.raises(ConfigError, match="16 and there are 8 experts"):
        spec_from_config({**QWEN, "num_experts_per_tok": 16})
    with pytest.raises(UnsupportedModelError, match="mamba"):
        spec_from_config({"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1})
    with pytest.raises(UnsupportedModelError, match="quark"):
        spec_from_config({**QWEN, "quantization_config": {"quant_method": "quark"}})
    with pytest.raises(ConfigError, match="whole number"):
        spec_from_config({**QWEN, "hidden_size": "64"})


def test_formats_change_bytes_only():
    spec = bundled_model("qwen3-30b-a3b").spec()
    small = spec.with_formats({"experts": "mxfp4"})
    assert small.total_weights == spec.total_weights
    assert small.expert_nbytes == spec.expert_nbytes * 17 // 64
    with pytest.raises(ConfigError, match="formats"):
        spec.with_formats({"experts": "int3"})


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(ModelNotFoundError, match="did you mean gpt-oss-120b"):
        bundled_model("openai/gpt-oss-12b")
    assert bundled_model("openai/GPT-OSS-120B").name == "gpt-oss-120b"


def test_keys_of_a_kind_of_attention():
    kind = AttentionKind("x", 1, 0, 0, 1, 1, 8, 8, cached=16, stride=4, recent=3, top_keys=5)
    assert [kind.keys(n) for n in (0, 3, 4, 100)] == [0, 3, 4, 28]
    assert kind.attended(100) == 5 + 3


GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, 4),  # layers 5, 11, 17 and 23 of 26
        ({"sliding_window_pattern": 2}, 13),
        ({"model_type": "gemma2"}, 13),
        ({"model_type": "cohere2"}, 6),  # 3, 7, ..., 23
        ({"model_type": "mistral"}, 0),
        ({"model_type": "qwen2", "use_sliding_window": False}, 26),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20}, 20),
    ],
)
def test_layers_without_a_window_keep_everything(changes, full):
    spec = spec_from_config({**GEMMA, **changes})
    token = 2 * 1 * 32 * 2  # keys and values of a head of 32, two bytes
    assert spec.kv_nbytes(10_000, 16) == full * 10_000 * token + (26 - full) * 512 * token


def test_gemma_is_tied_and_counted_as_the_engine_counts_it():
    ours, bridged = spec_from_config(GEMMA), plan_spec_of(ModelSpec.from_config(GEMMA))
    assert ours.weights()["lm_head"] == 0
    assert ours.weights() == bridged.weights()
    assert set(ours.attention) == set(bridged.attention)


def test_gemma_3_as_it_is_published_leaves_out_what_its_class_has():
    """Gemma 3 4B's whole text_config: 3.88 billion weights in 34 layers, 5 of which see everything."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    spec = spec_from_config({"model_type": "gemma3", "text_config": text})
    assert spec.total_weights == pytest.approx(3.88e9, rel=2e-3)
    assert spec.tied
    assert [kind.layers for kind in spec.attention] == [5, 29]
    assert spec.notes == ("only the text model is counted, not the towers for images or sound",)


# 32 layers of q, k, v, o and the three of the feed-forward; two tables of bfloat16; norms
_LINEAR = 32 * ((4096 + 2 * 1024 + 4096) * 4096 + 3 * 4096 * 14336)
_REST = (2 * 128256 * 4096 + 65 * 4096) * 2


@pytest.mark.parametrize(
    ("quantised", "nbytes"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625 * _LINEAR),  # 4.5 bits
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, _LINEAR),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, _LINEAR),
        ({"quant_method": "fp8"}, _LINEAR),
    ],
)
def test_a_quantised_dense_model_is_as_small_as_it_is(quantised, nbytes):
    spec = spec_from_config({**LLAMA_8B, "quantization_config": quantised})
    assert spec.weights_nbytes == pytest.approx(nbytes + _REST, rel=2e-3)


@pytest.mark.parametrize(
    "pattern", ["*self_attn*", "re:.*self_attn.*", "self_attn", "model.layers.{i}.self_attn"]
)
def test_what_is_left_out_of_the_quantisation_stays_as_it_was(pattern):
    attention, others = 32 * (4096 + 2 * 1024 + 4096) * 4096, 32 * 3 * 4096 * 14336
    quantised = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", *(pattern.format(i=i) for i in range(32))],
    }
    found = spec_from_config({**LLAMA_8B, "quantization_config": quantised}).nbytes()
    assert found["attention"] == 2 * attention
    assert found["dense"] == pytest.approx(0.5625 * others, rel=2e-3)


def test_a_kind_in_two_formats_has_the_mean():
    ignore = [f"model.layers.{i}.self_attn" for i in range(8)]  # a quarter of the layers
    quantised = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ignore}
    spec = spec_from_config({**LLAMA_8B, "quantization_config": quantised})
    assert spec.bits("attention") == pytest.approx(0.25 * 16 + 0.75 * 8, rel=1e-3)
    assert spec.bits("dense") == pytest.approx(8, rel=1e-3)


def test_what_is_not_known_is_said_or_refused():
    assert "'t5'" in spec_from_config({**LLAMA_8B, "model_type": "t5"}).notes[0]
    assert spec_from_config(LLAMA_8B).notes == ()
    with pytest.raises(UnsupportedModelError, match="float7"):
        spec_from_config({**LLAMA_8B, "torch_dtype": "float7"})
    with pytest.raises(ConfigError, match="at most 10,000"):
        spec_from_config({**LLAMA_8B, "num_hidden_layers": 10**12})


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("deepseek-v4-flash", "compress_ratios", -1),
        ("deepseek-v4-flash", "compress_ratios", ["a", 3]),
        ("deepseek-v4-flash", "compress_ratios", [4, 128]),  # of 43 layers
        ("deepseek-v4-flash", "compress_ratios", [7] * 43),
        ("qwen3-30b-a3b", "mlp_only_layers", 1.5),
        ("qwen3-30b-a3b", "mlp_only_layers", [True]),
        ("qwen3-30b-a3b", "layer_types", "full_attention"),
        ("qwen3-30b-a3b", "layer_types", [None]),
        ("glm-4.7", "moe_intermediate_size", 0),
    ],
)
def test_lists_and_counts_that_are_none_are_refused(model, key, value):
    with pytest.raises(ConfigError, match=key):
        spec_from_config({**bundled_model(model).config, key: value})


def test_counts_beyond_the_layers_cost_no_memory():
    spec = spec_from_config({**QWEN, "first_k_dense_replace": 10**30})
    assert spec.moe_layers == 0
    config = {**bundled_model("qwen3.6-35b-a3b").config, "num_hidden_layers": 2}
    assert [kind.name for kind in spec_from_config(config).attention] == ["linear"]
