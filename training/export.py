"""Write the trained mixture as a Hugging Face directory of the gpt-oss family, experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.model import MixtureModel

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rows, cols] -> codes uint8 [..., rows, cols / 32, 16] (elements 2i low, 2i + 1 high) and
    E8M0 scales uint8 [..., rows, cols / 32]; the rounding of ``model.fake_mxfp4``."""
    blocks = weight.detach().float().cpu().unflatten(-1, (-1, 32))
    peak = blocks.abs().amax(-1).clamp_min(2.0**-120)
    exponent = torch.floor(torch.log2(peak)) - 2
    x = (blocks / torch.exp2(exponent)[..., None]).abs().clamp_max(6.0)
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    magnitude = torch.round(x / step) * step
    code = torch.searchsorted(E2M1, magnitude.contiguous()).to(torch.uint8)
    code |= torch.signbit(blocks).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def config_of(model: MixtureModel) -> dict[str, object]:
    s = model.shape
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "num_local_experts": s.experts,
        "num_experts_per_tok": s.chosen,
        "sliding_window": s.window,
        "layer_types": [
            "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(s.layers)
        ],
        "max_position_embeddings": s.context,
        "rope_theta": s.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.theta},
        "rms_norm_eps": s.eps,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": [0, 2],
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


def tensors_of(model: MixtureModel) -> dict[str, Tensor]:
    """The state under gpt-oss's stored names."""

    def bf16(t: Tensor) -> Tensor:
        return t.detach().to("cpu", torch.bfloat16).contiguous()

    out = {
        "model.embed_tokens.weight": bf16(model.embed.weight),
        "model.norm.weight": bf16(model.norm.weight),
    }
    for i, layer in enumerate(model.layers):
        p, attn, moe = f"model.layers.{i}.", layer.attn, layer.moe
        out[p + "input_layernorm.weight"] = bf16(layer.attn_norm.weight)
        out[p + "post_attention_layernorm.weight"] = bf16(layer.ffn_norm.weight)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out[f"{p}self_attn.{name}.weight"] = bf16(getattr(attn, name).weight)
            out[f"{p}self_attn.{name}.bias"] = bf16(getattr(attn, name).bias)
        out[p + "self_attn.sinks"] = bf16(attn.sinks)
        out[p + "mlp.router.weight"] = bf16(moe.router.weight)
        out[p + "mlp.router.bias"] = bf16(moe.router.bias)
        gate_up = torch.stack((moe.gate, moe.up), 2).flatten(1, 2)  # rows 2i gate, 2i + 1 up
        bias = torch.stack((moe.gate_bias, moe.up_bias), 2).flatten(1, 2)
        for name, weight, b in (("gate_up", gate_up, bias), ("down", moe.down, moe.down_bias)):
            codes, scales = quantise_mxfp4(weight)
            out[f"{p}mlp.experts.{name}_proj_blocks"] = codes.contiguous()
            out[f"{p}mlp.experts.{name}_proj_scales"] = scales.contiguous()
            out[f"{p}mlp.experts.{name}_proj_bias"] = bf16(b)
    return out


def export(model: MixtureModel, tokenizer: Path, out: Path) -> None:
    """Write config, tokenizer, template and one safetensors file to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config_of(model), indent=1) + "\n")
    shutil.copy(tokenizer, out / "tokenizer.json")
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "chat_template": TEMPLATE,
                "model_max_length": model.shape.context,
            },
            indent=1,
        )
        + "\n"
    )
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}) + "\n")
    save_file(tensors_of(model), out / "model.safetensors", metadata={"format": "pt"})
