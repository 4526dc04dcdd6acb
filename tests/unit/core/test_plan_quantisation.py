"""Bytes of quantised checkpoints from their ``quantization_config``, by hand from the file formats."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.plan_reading import spec_from_config
from tests.fixtures.llama_config import LLAMA_8B

INT4 = {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def bits(quantised: dict[str, object]) -> dict[str, float]:
    spec = spec_from_config({**LLAMA_8B, "quantization_config": quantised})
    return {kind: spec.bits(kind) for kind in ("attention", "dense", "embedding", "lm_head")}


def compressed(*groups: dict[str, object], **more: object) -> dict[str, object]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **more}


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        # four-bit codes; a float16 scale and a zero point of four bits for each 128
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_method": "gptq", "bits": 4}, 4 + 20 / 128),  # transformers' default group
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),  # one scale a row
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),  # float32 for each 64
        ({"quant_method": "fbgemm_fp8"}, 8),
        (compressed({"targets": ["Linear"], "weights": INT4}), 4 + 16 / 128),
        (compressed({"targets": ["Linear"], "weights": {**INT4, "group_size": 32}}), 4.5),
        (compressed({"targets": ["Linear"], "weights": {**FP4, "group_size": 32}}), 4.25),
        (
            compressed({"targets": ["Linear"], "weights": {**INT4, "symmetric": False}}),
            4 + 20 / 128,
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, 4 + 16 / 128),
    ],
)
def test_bits_of_one_format(quantised, expected):
    found = bits(quantised)
    assert found["attention"] == pytest.approx(expected)
    assert found["dense"] == pytest.approx(expected)
    assert found["embedding"] == found["lm_head"] == 16


def test_a_published_file_has_the_size_that_is_published():
    """Meta-Llama-3-8B-Instruct-AWQ is 5.73 GB on the hub."""
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128}
    spec = spec_from_config({**LLAMA_8B, "quantization_config": quantised})
    assert spec.weights_nbytes == pytest.approx(5.73e9, rel=2e-3)


def test_groups_of_modules_have_formats_of_their_own():
    """NVFP4 feed-forwards beside FP8 attention: 4.5 and 8 bits, not 4.5 for both."""
    mixed = compressed(
        {"targets": ["re:.*mlp.*"], "weights": FP4},
        {"targets": ["re:.*self_attn.*"], "weights": FP8},
    )
    assert bits(mixed)["dense"] == pytest.approx(4.5)
    assert bits(mixed)["attention"] == pytest.approx(8)
    # a name comes before the class, wherever it stands; one of three matrices is another
    mixed = compressed(
        {"targets": ["Linear"], "weights": FP4}, {"targets": ["re:.*down_proj$"], "weights": FP8}
    )
    assert bits(mixed)["dense"] == pytest.approx((4.5 + 4.5 + 8) / 3)
    assert bits(mixed)["attention"] == pytest.approx(4.5)


def test_modelopts_layers_have_algorithms_of_their_own():
    layers = {
        f"model.layers.{i}.mlp.{m}_proj": {"quant_algo": "NVFP4"}
        for i in range(16)
        for m in ("gate", "up")
    }
    layers |= {f"model.layers.{i}.mlp.down_proj": {"quant_algo": "FP8"} for i in range(16)}
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    assert bits(mixed)["dense"] == pytest.approx((16 * 2 * 4.5 + 16 * 8 + 16 * 3 * 16) / (32 * 3))
    assert bits(mixed)["attention"] == 16


def test_mlx_stores_its_tables_too():
    """Four bits with a scale and a bias of 16 for each 64: 4.5; one projection of eight bits."""
    config = {**LLAMA_8B, "quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}
    spec = spec_from_config(config)
    assert spec.bits("dense") == spec.bits("attention") == spec.bits("embedding") == 4.5
    assert spec.weights_nbytes == pytest.approx(
        4.5 / 8 * (spec.total_weights - 65 * 4096), rel=1e-3
    )
    own = {f"model.layers.{i}.mlp.down_proj": {"bits": 8, "group_size": 64} for i in range(32)}
    config["quantization"] |= own
    assert spec_from_config(config).bits("dense") == pytest.approx((4.5 + 4.5 + 8.5) / 3)
    config["quantization"] = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    assert spec_from_config(config).bits("dense") == 4.25


def test_mlxs_tables_and_routers_have_numbers_of_their_own():
    """A head of six bits, an embedding that stays in bfloat16, and routers of eight in half of the layers,
    each with 32 bits for a group of 64."""
    own: dict[str, object] = {"model.embed_tokens": False, "lm_head": {"bits": 6, "group_size": 64}}
    own |= {f"model.layers.{i}.mlp.gate": {"bits": 8, "group_size": 64} for i in range(16)}
    mixture = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = {**LLAMA_8B, **mixture, "quantization": {"bits": 4, "group_size": 64, **own}}
    spec = spec_from_config(config)
    wanted = {"embedding": 16, "lm_head": 6.5, "router": 6.5, "experts": 4.5, "attention": 4.5}
    assert {kind: spec.bits(kind) for kind in wanted} == wanted


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False}, 16),
        # An exception of what is quantised, which the head is not.
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, 16),
        (compressed({"targets": ["Linear"], "weights": INT4}), 16),
        (
            compressed(
                {"targets": ["Linear"], "weights": INT4},
                {"targets": ["re:.*lm_head"], "weights": {"num_bits": 8, "type": "int"}},
            ),
            8,
        ),
        (compressed({"targets": ["lm_head"], "weights": INT4}, ignore=["lm_head"]), 16),
    ],
)
def test_an_output_head_is_quantised_where_it_is_said(quantised, expected):
    assert bits(quantised)["lm_head"] == pytest.approx(expected)
    assert bits(quantised)["embedding"] == 16


def test_gptqmodels_exceptions():
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    left_out = {**quantised, "dynamic": {"-:.*self_attn.*": {}}}
    assert bits(left_out)["attention"] == 16
    wider = {**quantised, "dynamic": {"+:.*down_proj.*": {"bits": 8}}}
    assert bits(wider)["dense"] == pytest.approx((2 * (4 + 20 / 128) + 8 + 24 / 128) / 3)


@pytest.mark.parametrize(
    ("quantised", "error", "message"),
    [
        ({"quant_method": "awq"}, ConfigError, "None for bits"),
        ({"quant_method": "awq", "bits": "four"}, ConfigError, "'four' for bits"),
        (
            {"quant_method": "fp8", "ignored_layers": ["re:(["]},
            ConfigError,
            "no regular expression",
        ),
        (
            compressed({"targets": ["Linear"], "weights": INT4, "format": "marlin-24"}),
            UnsupportedModelError,
            "marlin-24",
        ),
        (
            compressed({"targets": ["Linear"], "weights": None}),
            UnsupportedModelError,
            "weights are None",
        ),
        (
            compressed({"weights": {"num_bits": 4, "type": "float", "group_size": [16]}}),
            UnsupportedModelError,
            "group_size",
        ),
        (
            {
                "quant_method": "modelopt",
                "quantized_layers": {"a": {"quant_algo": "X"}},
                "quant_algo": "MIXED_PRECISION",
            },
            UnsupportedModelError,
            r"quantized_layers\['a'\]",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_name(quantised, error, message):
    with pytest.raises(error, match=message):
        bits(quantised)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_attention_heads": 0}, ConfigError, "num_attention_heads is 0"),
        ({"num_key_value_heads": 7}, ConfigError, "num_key_value_heads is 7"),
        ({"num_key_value_heads": 64}, ConfigError, "num_key_value_heads is 64"),
        (
            {"num_attention_heads": 8192},
            ConfigError,
            "8,192 and hidden_size 4,096, without",
        ),
        ({"intermediate_size": 0}, ConfigError, "intermediate_size is 0"),
        ({"hidden_size": 10**30}, ConfigError, "at most"),
        ({"layer_types": ["full_attention"] * 3}, ConfigError, "3 entries"),
        ({"layer_types": ["conv"] * 32}, UnsupportedModelError, "has conv"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        spec_from_config({**LLAMA_8B, **change})


def test_chunked_attention_keeps_a_chunk():
    types = ["chunked_attention"] * 24 + ["full_attention"] * 8
    spec = spec_from_config({**LLAMA_8B, "layer_types": types, "attention_chunk_size": 1024})
    token = 2 * 8 * 128 * 2  # keys and values of 8 heads of 128, two bytes
    assert spec.kv_nbytes(8192, 16) == (24 * 1024 + 8 * 8192) * token
