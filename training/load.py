"""Read an exported directory back into ``MixtureModel``: the inverse of ``training.export``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.export import E2M1
from training.model import MixtureModel, Shape


def dequantise_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., rows, blocks, 16] and scales [..., rows, blocks] -> float32 [..., rows, cols]."""
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = E2M1[both & 7] * torch.where(both >= 8, -1.0, 1.0)
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def shape_of(config: dict[str, object]) -> Shape:
    """The sizes that ``export.config_of`` wrote."""
    names = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "experts": "num_local_experts",
        "chosen": "num_experts_per_tok", "intermediate": "intermediate_size",
        "vocab": "vocab_size", "window": "sliding_window", "context": "max_position_embeddings",
        "theta": "rope_theta", "eps": "rms_norm_eps",
    }  # fmt: skip
    return Shape(**{field: config[key] for field, key in names.items()})  # type: ignore[arg-type]


def load_exported(folder: Path) -> MixtureModel:
    """The model as shipped: experts hold the dequantised values, in float32."""
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    model = MixtureModel(shape)
    state = {"embed.weight": stored["model.embed_tokens.weight"], "norm.weight": stored["model.norm.weight"]}  # fmt: skip
    for i in range(shape.layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        state[ours + "attn_norm.weight"] = stored[theirs + "input_layernorm.weight"]
        state[ours + "ffn_norm.weight"] = stored[theirs + "post_attention_layernorm.weight"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for part in ("weight", "bias"):
                state[f"{ours}attn.{name}.{part}"] = stored[f"{theirs}self_attn.{name}.{part}"]
        state[ours + "attn.sinks"] = stored[theirs + "self_attn.sinks"]
        for part in ("weight", "bias"):
            state[f"{ours}moe.router.{part}"] = stored[f"{theirs}mlp.router.{part}"]
        experts = theirs + "mlp.experts."
        gate_up, down = (
            dequantise_mxfp4(stored[f"{experts}{n}_blocks"], stored[f"{experts}{n}_scales"])
            for n in ("gate_up_proj", "down_proj")
        )
        bias = stored[experts + "gate_up_proj_bias"]
        state[ours + "moe.gate"], state[ours + "moe.up"] = gate_up[:, 0::2], gate_up[:, 1::2]
        state[ours + "moe.gate_bias"], state[ours + "moe.up_bias"] = bias[:, 0::2], bias[:, 1::2]
        state[ours + "moe.down"] = down
        state[ours + "moe.down_bias"] = stored[experts + "down_proj_bias"]
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model
