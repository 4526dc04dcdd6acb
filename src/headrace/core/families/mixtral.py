"""Mixtral. In GGUF its architecture is "llama" with an expert count: see ``llama``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.families import naming
from headrace.core.families.base import Family
from headrace.core.families.reading import (
    ConfigReader,
    read_heads,
    read_rope,
    read_sizes,
    read_top_k,
    uniform_layers,
)
from headrace.core.model_spec import ModelSpec, MoeSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    heads, kv_heads, head_dim = read_heads(reader)
    sizes = read_sizes(reader)
    experts, chosen = read_top_k(reader, "num_local_experts", "num_experts")
    window = reader.raw("sliding_window", default=None)
    if window is not None:
        window = reader.integer("sliding_window")
    reader.must_be("hidden_act", "silu")
    spec = ModelSpec(
        family="mixtral",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-5),
        rope=read_rope(reader, head_dim, sizes["max_context"], theta=1e6),
        layers=uniform_layers(reader.integer("num_hidden_layers"), window=window, moe=True),
        moe=MoeSpec(experts, chosen, sizes["intermediate"], "softmax_topk", normalize=True),
        **sizes,
    )
    reader.refuse_rest()
    return spec


_MOE = "model.layers.{i}.block_sparse_moe."

FAMILY = Family(
    name="mixtral",
    hf_architectures=("MixtralForCausalLM",),
    spec=_spec,
    hf_names={
        **naming.HF_CORE,
        **naming.HF_EXPERTS,
        _MOE + "gate.weight": "layers.{i}.router",
        _MOE + "experts.{e}.w1.weight": "layers.{i}.experts.{e}.gate",
        _MOE + "experts.{e}.w2.weight": "layers.{i}.experts.{e}.down",
        _MOE + "experts.{e}.w3.weight": "layers.{i}.experts.{e}.up",
    },
)
