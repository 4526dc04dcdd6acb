"""GGUF metadata as configurations."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.families import family_of_gguf
from headrace.core.model_spec import ModelSpec

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def spec_of(metadata: dict[str, Any]) -> ModelSpec:
    family = family_of_gguf(metadata["general.architecture"])
    assert family.gguf_config is not None
    return family.spec(family.gguf_config(metadata))


def test_smollm2() -> None:
    spec = spec_of(LLAMA)
    assert (spec.num_layers, spec.hidden, spec.intermediate, spec.vocab) == (30, 576, 1536, 49152)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert spec.rope.theta == 100000.0
    assert spec.tie_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


def test_vocabulary_from_the_tokenizer() -> None:
    metadata = {k: v for k, v in LLAMA.items() if k != "llama.vocab_size"}
    assert spec_of({**metadata, "tokenizer.ggml.tokens": ["a", "b", "c"]}).vocab == 3
    with pytest.raises(ConfigError, match=r"llama\.vocab_size"):
        spec_of(metadata)


def test_mixtral_is_a_llama_with_experts() -> None:
    spec = spec_of({**LLAMA, "llama.expert_count": 8, "llama.expert_used_count": 2})
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_token) == (8, 2)
    assert spec.moe.intermediate == 1536
    assert spec.moe.normalize


def test_one_count_for_each_layer() -> None:
    assert spec_of({**LLAMA, "llama.attention.head_count_kv": [3] * 30}).num_kv_heads == 3
    with pytest.raises(ConfigError, match=r"head_count_kv differs between layers: \[1, 3\]"):
        spec_of({**LLAMA, "llama.attention.head_count_kv": [3, 1] * 15})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.value_length", 32),
        ("llama.rope.dimension_count", 32),
        ("llama.logit_scale", 0.5),
        ("llama.rope.scaling.yarn_attn_factor", 2.0),
        ("llama.expert_used_count", 2),
    ],
)
def test_unknown_numerics_are_refused(key: str, value: Any) -> None:
    metadata = {**LLAMA, key: value}
    if "scaling" in key:
        metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(metadata)
    assert key in caught.value.message


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        family_of_gguf("mamba")
    assert caught.value.hint is not None
    assert "gpt-oss" in caught.value.hint
    assert "llama" in caught.value.hint
