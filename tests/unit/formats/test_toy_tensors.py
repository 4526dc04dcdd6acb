"""The toy checkpoints' bytes, read through the formats, are the numbers that they promise."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.formats.base import PackedTensor, dequantize
from tests.fixtures import toy
from tests.unit.formats import bits


def read(name: str, made: toy.Toy, numerics: str) -> torch.Tensor:
    """One linear weight of a toy Qwen3-MoE, its parts found as a loader would find them."""
    stem = name.removesuffix("weight")

    def raw(suffix: str) -> torch.Tensor:
        return torch.from_numpy(made.stored[stem + suffix].raw)

    shape = made.weights[name].shape
    if numerics.startswith("fp8"):
        scale = raw("weight_scale" if numerics == "fp8_tensor" else "weight_scale_inv")
        if numerics.endswith("bf16"):
            scale = scale.view(torch.bfloat16).float()
        parts = {"codes": raw("weight"), "scale": scale}
        return dequantize(PackedTensor("fp8_e4m3", shape, parts))
    if numerics == "nvfp4_modelopt":
        codes, multiplier = raw("weight"), raw("weight_scale_2")
    else:
        codes, multiplier = raw("weight_packed"), raw("weight_global_scale")[0].reciprocal()
    parts = {"codes": codes, "scales": raw("weight_scale"), "global_scale": multiplier}
    return dequantize(PackedTensor("nvfp4", shape, parts))


@pytest.mark.parametrize("numerics", toy.QWEN3_NUMERICS[2:])
def test_qwen3_moe(tmp_path: Path, numerics: str) -> None:
    made = toy.write_qwen3_moe(tmp_path, numerics)
    exact = toy.write_qwen3_moe(tmp_path / "f32", "f32").weights
    names = [n for n in made.weights if n.endswith("_proj.weight")]
    assert len(names) == 2 * (4 + 8 * 3)
    for name in names:
        found = read(name, made, numerics).numpy()
        bits.same_bits(found, made.weights[name])
        # A wrong nibble order or scale would be off by the weights' own size, not by a tenth.
        error = np.sqrt(np.mean((found - exact[name]) ** 2) / np.mean(exact[name] ** 2))
        assert error < (0.04 if numerics.startswith("fp8") else 0.12)


def test_gpt_oss_containers_agree(tmp_path: Path) -> None:
    made = toy.write_gpt_oss(tmp_path)
    in_gguf = toy.write_gpt_oss_gguf(tmp_path / "toy.gguf")
    assert made.weights.keys() == in_gguf.weights.keys()
    tensors = {t.name: t for t in gguf.GGUFReader(in_gguf.path).tensors}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        for projection, names in (
            ("gate_up_proj", ("ffn_gate_exps", "ffn_up_exps")),
            ("down_proj", ("ffn_down_exps",)),
        ):
            expected = made.weights[experts + projection]
            codes = made.stored[f"{experts}{projection}_blocks"].raw
            parts = {
                "codes": torch.from_numpy(codes.reshape(*codes.shape[:2], -1)),
                "scales": torch.from_numpy(made.stored[f"{experts}{projection}_scales"].raw),
            }
            found = dequantize(PackedTensor("mxfp4", expected.shape, parts))
            bits.same_bits(found.numpy(), expected)
            for k, name in enumerate(names):
                tensor = tensors[f"blk.{layer}.{name}.weight"]
                blocks = torch.from_numpy(np.array(tensor.data))
                want = expected[:, k :: len(names)]
                found = dequantize(PackedTensor("mxfp4_gguf", want.shape, {"blocks": blocks}))
                bits.same_bits(found.numpy(), want)


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    one = toy.write_qwen3_moe(tmp_path / "one", "f32", tied=True)
    toy.write_qwen3_moe(tmp_path / "three", "f32", tied=True, shards=3)
    whole = load_file(one.path / "model.safetensors")
    parts: dict[str, np.ndarray] = {}
    for path in sorted((tmp_path / "three").glob("*.safetensors")):
        parts |= load_file(path)
    assert "lm_head.weight" not in whole
    assert whole.keys() == parts.keys() == one.weights.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(value, parts[name])
