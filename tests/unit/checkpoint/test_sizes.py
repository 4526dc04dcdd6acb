"""Weights in bytes, from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.safetensors import read_directory
from headrace.checkpoint.sizes import require_fit, weight_sizes
from headrace.core.errors import DoesNotFitError, UnsupportedModelError
from tests.fixtures import toy

# config.json of openai/gpt-oss-120b, the keys that shape it.
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "initial_context_length": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
}


def test_b016_gpt_oss_120b_by_hand() -> None:
    sizes = weight_sizes(GPT_OSS_120B)
    weights = 36 * 128 * 3 * 2880 * 2880  # gate, up, down
    biases = 36 * 128 * (2 * 2880 + 2880)
    assert sizes.experts == weights // 32 * 17 + 2 * biases
    assert sizes.embeddings == 2 * 2 * 201088 * 2880
    q, kv = 64 * 64, 8 * 64
    attention = 2880 * (q + 2 * kv) + q + 2 * kv + q * 2880 + 2880 + 64  # biases, sinks
    router, norms = 128 * 2880 + 128, 2 * 2880
    assert sizes.dense == 2 * (36 * (attention + router + norms) + 2880)
    # The published files hold 65.2 GB.
    assert sizes.total == pytest.approx(65.25e9, rel=1e-3)


def test_b016_refused_on_a_host_of_32_gb_before_anything_is_read() -> None:
    host_nbytes = 32 * 10**9
    spared = 5 * 10**9  # for the system and our own process
    with pytest.raises(DoesNotFitError) as caught:
        require_fit(weight_sizes(GPT_OSS_120B).total, host_nbytes - spared, "gpt-oss-120b")
    message = str(caught.value)
    assert "gpt-oss-120b needs 65.2 GB, this machine can give 27.0 GB" in message
    assert "hint: " in message
    require_fit(weight_sizes(GPT_OSS_120B).total, 128 * 10**9, "gpt-oss-120b")


@pytest.mark.parametrize("numerics", toy.QWEN3_NUMERICS)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_files(tmp_path: Path, numerics: str, tied: bool) -> None:
    made = toy.write_qwen3_moe(tmp_path / "m", numerics, tied=tied)
    stored = read_directory(made.path).tensors.values()
    # Small scales (one per tensor, one per 128 x 128 block) are left out, as it says.
    apart = ("weight_scale_inv", "weight_scale_2", "global_scale", "input_scale")
    actual = sum(
        t.data.nbytes
        for t in stored
        if not t.name.endswith(apart) and not (t.name.endswith("weight_scale") and t.dtype == "F32")
    )
    assert weight_sizes(made.config).total == actual


def test_sizes_of_gpt_oss_are_those_of_its_file(tmp_path: Path) -> None:
    made = toy.write_gpt_oss(tmp_path / "m")
    stored = read_directory(made.path).tensors.values()
    experts = sum(t.data.nbytes for t in stored if ".experts." in t.name)
    sizes = weight_sizes(made.config)
    assert sizes.experts == experts
    assert sizes.total == sum(t.data.nbytes for t in stored)


def test_dtype_must_be_known() -> None:
    with pytest.raises(UnsupportedModelError, match="'float64'"):
        weight_sizes({**GPT_OSS_120B, "torch_dtype": "float64"})
