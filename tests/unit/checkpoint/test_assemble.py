"""Toy Hugging Face checkpoints in every numeric format, against the numbers that they stand for."""

from __future__ import annotations

import json
import shutil
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.checkpoint.names import NameMap
from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint, RawTensor
from headrace.checkpoint.scales import CheckedTensors
from headrace.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.fixtures import toy
from tests.fixtures.toy import Stored

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """OCP FP8 E4M3 by its definition, in float64."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    return sign * np.where((codes & 0x7F) == 0x7F, np.nan, value)


def pairs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """E2M1 of packed codes, low nibble first."""
    return E2M1[np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)]


def decoded(raw: RawTensor) -> npt.NDArray[np.float64]:
    """The numbers that the parts of a RawTensor stand for, by ``PackedTensor``'s description."""
    parts = raw.parts
    if raw.format == "f32":
        return parts["data"].astype(np.float64)
    if raw.format == "bf16":
        return (parts["data"].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if raw.format == "mxfp4":
        scales = 2.0 ** (parts["scales"].astype(np.float64) - 127)
        return pairs(parts["codes"]) * np.repeat(scales, 32, -1)
    if raw.format == "nvfp4":
        scales = np.repeat(e4m3(parts["scales"]), 16, -1)
        product = (pairs(parts["codes"]) * scales).astype(np.float32)
        return (product * parts["global_scale"][..., None, None]).astype(np.float64)
    assert raw.format == "fp8_e4m3"
    scale = parts["scale"]
    if scale.ndim == 2:
        scale = scale.repeat(128, 0).repeat(128, 1)[: raw.shape[0], : raw.shape[1]]
    return (e4m3(parts["codes"]).astype(np.float32) * scale).astype(np.float64)


def check(checkpoint: Checkpoint, weights: dict[str, npt.NDArray[np.float32]]) -> None:
    names = NameMap(checkpoint.family.hf_names)
    assert len(checkpoint.tensors) == len(weights)
    for stored, values in weights.items():
        canonical = names.canonical(stored)
        assert canonical is not None
        np.testing.assert_array_equal(decoded(checkpoint.tensors[canonical]), values, stored)


@pytest.mark.parametrize("numerics", toy.QWEN3_NUMERICS)
def test_qwen3_moe_in_every_format(tmp_path: Path, numerics: str) -> None:
    made = toy.write_qwen3_moe(tmp_path / numerics, numerics, shards=2)
    checkpoint = open_checkpoint(str(made.path))
    check(checkpoint, made.weights)
    expected = {"f": "fp8_e4m3", "n": "nvfp4"}.get(numerics[0], numerics)
    expected = numerics if numerics in ("f32", "bf16") else expected
    assert checkpoint.tensors["layers.1.experts.7.down"].format == expected
    unused = [n for n in checkpoint.notes if "input" in n]
    assert len(unused) == numerics.startswith("nvfp4")


def test_gpt_oss_keeps_its_interleaved_experts_in_one_tensor(tmp_path: Path) -> None:
    made = toy.write_gpt_oss(tmp_path / "oss", shards=3)
    checkpoint = open_checkpoint(str(made.path))
    check(checkpoint, made.weights)
    joined = checkpoint.tensors["layers.0.experts.gate_up"]
    assert (joined.format, joined.shape) == ("mxfp4", (8, 192, 64))
    assert joined.parts["codes"].shape == (8, 192, 32)
    assert joined.parts["scales"].shape == (8, 192, 2)


def test_gpt_oss_is_the_same_model_in_gguf(tmp_path: Path) -> None:
    here = open_checkpoint(str(toy.write_gpt_oss(tmp_path / "oss").path))
    there = open_checkpoint(str(toy.write_gpt_oss_gguf(tmp_path / "oss.gguf").path))
    assert here.spec.layers == there.spec.layers
    assert here.spec.rope == there.spec.rope
    assert there.tensors["layers.1.experts.gate"].format == "mxfp4_gguf"
    for name in ("embed", "lm_head", "layers.0.q"):
        np.testing.assert_array_equal(decoded(here.tensors[name]), decoded(there.tensors[name]))
    joined = decoded(here.tensors["layers.1.experts.gate_up_bias"])
    for offset, name in enumerate(("gate", "up")):
        bias = decoded(there.tensors[f"layers.1.experts.{name}_bias"])
        np.testing.assert_array_equal(joined[:, offset::2], bias)


def test_codes_are_views_of_the_map(tmp_path: Path) -> None:
    for made in (
        toy.write_gpt_oss(tmp_path / "oss"),
        toy.write_qwen3_moe(tmp_path / "nv", "nvfp4_compressed"),
    ):
        tensors = open_checkpoint(str(made.path)).tensors
        assert isinstance(tensors, CheckedTensors)
        for raw in tensors.unchecked.values():
            for key, part in raw.parts.items():
                base: Any = part
                while isinstance(base, np.ndarray):
                    base = base.base
                small = key == "global_scale"  # inverted: a number of its own
                assert small or isinstance(getattr(base, "obj", base), mmap), (raw.name, key)


# --- what is wrong with a checkpoint -------------------------------------------------------------


def rewrite(
    made: toy.Toy,
    change: dict[str, Stored | None],
    config: dict[str, Any] | None = None,
) -> str:
    """Write the toy again with some tensors replaced, added, or (None) left out."""
    folder = made.path.parent / f"changed{len(list(made.path.parent.iterdir()))}"
    shutil.copytree(made.path, folder)
    stored = {k: v for k, v in {**made.stored, **change}.items() if v is not None}
    toy.write_safetensors(folder / "model.safetensors", stored)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({**made.config, **config}))
    return str(folder)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> toy.Toy:
    return toy.write_qwen3_moe(tmp_path_factory.mktemp("toys") / "bf16", "bf16")


def at(expert: str) -> str:
    return f"model.layers.0.mlp.experts.3.{expert}"


def vector(*shape: int, dtype: str = "F32") -> Stored:
    kinds = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8, "F64": np.float64}
    return Stored(dtype, np.ones(shape, kinds[dtype]))


def test_unknown_tensors_are_named(bf16: toy.Toy) -> None:
    for name in ("model.layers.0.self_attn.mystery.weight", "model.layers.9.mlp.gate.weight"):
        with pytest.raises(CheckpointError, match=f"{name}: the model has no place"):
            open_checkpoint(rewrite(bf16, {name: vector(4)}))


def test_b005_an_unknown_tensor_without_elements_is_left_out(bf16: toy.Toy) -> None:
    checkpoint = open_checkpoint(rewrite(bf16, {"model.extra": vector(0, 64)}))
    assert checkpoint.notes == ("model.safetensors: tensor 'model.extra' is empty and not used",)
    with pytest.raises(CheckpointError, match=r"norm\.weight: shape \[0\], expected \[64\]"):
        open_checkpoint(rewrite(bf16, {"model.norm.weight": vector(0)}))


def test_frequencies_that_theta_gives_are_left_out(bf16: toy.Toy) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoint = open_checkpoint(rewrite(bf16, {name: vector(16)}))
    assert set(checkpoint.tensors) == set(open_checkpoint(str(bf16.path)).tensors)
    assert name in checkpoint.notes[0]


def test_missing_tensors_are_named(bf16: toy.Toy) -> None:
    names = [at("gate_proj.weight"), "lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(rewrite(bf16, dict.fromkeys(names)))
    for name in ("2 tensors are missing", *names):
        assert name in str(caught.value)


def test_shapes_are_checked(bf16: toy.Toy) -> None:
    turned = Stored("BF16", bf16.stored[at("up_proj.weight")].raw.T.copy())
    with pytest.raises(CheckpointError, match=r"up_proj.*shape \[64, 160\], expected \[160, 64\]"):
        open_checkpoint(rewrite(bf16, {at("up_proj.weight"): turned}))


def test_only_floats_are_weights(bf16: toy.Toy) -> None:
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight has dtype F64.*\n.*BF16"):
        open_checkpoint(rewrite(bf16, {"model.norm.weight": vector(64, dtype="F64")}))


def test_a_tied_head_is_absent_or_equal(tmp_path: Path) -> None:
    made = toy.write_qwen3_moe(tmp_path / "tied", "bf16", tied=True)
    assert "lm_head" not in open_checkpoint(str(made.path)).tensors
    embed = made.stored["model.embed_tokens.weight"]
    same = open_checkpoint(rewrite(made, {"lm_head.weight": embed}))
    assert "lm_head" not in same.tensors
    assert "repeats the embedding" in same.notes[0]
    other = Stored("BF16", embed.raw + np.uint16(1))
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        open_checkpoint(rewrite(made, {"lm_head.weight": other}))


@pytest.mark.parametrize(
    ("numerics", "change", "words"),
    [
        ("fp8_block", {"weight_scale_inv": None}, ("gate_proj.weight: its scale is missing",)),
        ("fp8_block", {"weight": None}, ("weight that they belong to is missing",)),
        ("fp8_tensor", {"weight_scale": vector(160, 1)}, ("[160, 1]", "one scale per tensor")),
        ("fp8_tensor", {"weight_scale": vector(1, dtype="F64")}, ("F64", "F32, F16, BF16")),
        ("fp8_tensor", {"weight_scale_inv": vector(1)}, ("already holds this part",)),
        ("nvfp4_modelopt", {"weight_scale_2": None}, ("weight_scale_2 is missing",)),
        ("nvfp4_modelopt", {"weight_scale": vector(160, 4)}, ("expected F8_E4M3 [160, 4]",)),
        ("nvfp4_modelopt", {"weight_scale_2": vector(2)}, ("shape [2], expected one number",)),
        ("nvfp4_modelopt", {"weight_global_scale": vector()}, ("does not belong to the format",)),
        ("nvfp4_compressed", {"weight_global_scale": None}, ("weight_global_scale is missing",)),
        (
            "nvfp4_compressed",
            {"weight_global_scale": Stored("F32", np.zeros(1, np.float32))},
            ("not positive",),
        ),
        ("bf16", {"weight_scale": vector()}, ("a scale for", "stored as BF16")),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, numerics: str, change: dict[str, Stored | None], words: tuple[str, ...]
) -> None:
    made = toy.write_qwen3_moe(tmp_path / numerics, numerics)
    changed = {at(f"gate_proj.{part}"): tensor for part, tensor in change.items()}
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        open_checkpoint(rewrite(made, changed))
    for word in (*words, "hint: ", "experts.3.gate_proj"):
        assert word in str(caught.value)


def test_mxfp4_blocks_and_scales_must_match(tmp_path: Path) -> None:
    made = toy.write_gpt_oss(tmp_path / "oss")
    name = "model.layers.1.mlp.experts.down_proj"
    for change, word in (
        ({name + "_scales": None}, "its scale is missing"),
        ({name + "_scales": vector(8, 64, 4, dtype="U8")}, r"expected U8 \[8, 64, 3\]"),
        ({name + "_blocks": vector(8, 64, 3, 8, dtype="U8")}, r"columns / 32, 16\]"),
        ({name + "_blocks": None}, "weight that they belong to is missing"),
    ):
        with pytest.raises(CheckpointError, match=word):
            open_checkpoint(rewrite(made, change))


def test_unquantised_gpt_oss_experts_are_stored_transposed(tmp_path: Path) -> None:
    made = toy.write_gpt_oss(tmp_path / "oss")
    change: dict[str, Stored | None] = {}
    for name, weights in made.weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            change |= {name + "_blocks": None, name + "_scales": None}
            change[name] = Stored("F32", np.ascontiguousarray(weights.swapaxes(1, 2)))
    checkpoint = open_checkpoint(rewrite(made, change, {"quantization_config": None}))
    assert checkpoint.tensors["layers.0.experts.gate_up"].shape == (8, 64, 192)
    upright = {n: Stored("F32", made.weights[n]) for n in change if n in made.weights}
    with pytest.raises(CheckpointError, match=r"\[8, 192, 64\], expected \[8, 64, 192\]"):
        open_checkpoint(rewrite(made, {**change, **upright}, {"quantization_config": None}))


def test_a_quantised_tensor_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    made = toy.write_qwen3_moe(tmp_path / "fp8", "fp8_tensor")
    with pytest.raises(CheckpointError, match="is fp8_e4m3, but the configuration names no quant"):
        open_checkpoint(rewrite(made, {}, {"quantization_config": None}))


def test_modelopt_without_a_configuration_of_its_own(tmp_path: Path) -> None:
    # Older exports say it in hf_quant_config.json alone.
    made = toy.write_qwen3_moe(tmp_path / "nv", "nvfp4_modelopt")
    checkpoint = open_checkpoint(rewrite(made, {}, {"quantization_config": None}))
    check(checkpoint, made.weights)


def test_b109_scales_of_the_kv_cache_are_known_and_unused(tmp_path: Path) -> None:
    made = toy.write_qwen3_moe(tmp_path / "nv", "nvfp4_modelopt")
    attention = "model.layers.0.self_attn."
    extra = {attention + "k_proj.k_scale": vector(), attention + "v_scale": vector()}
    checkpoint = open_checkpoint(rewrite(made, dict(extra)))
    said = [n for n in checkpoint.notes if "_scale are not used" in n or "_scale is not used" in n]
    assert len(said) == 3


def test_layers_are_bounded_by_the_tensors(bf16: toy.Toy) -> None:
    with pytest.raises(CheckpointError, match="1000000000000 layers, but there are only 69"):
        open_checkpoint(rewrite(bf16, {}, {"num_hidden_layers": 10**12}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        open_checkpoint(rewrite(bf16, {}, {"num_hidden_layers": 0}))
    with pytest.raises(CheckpointError, match="tensors are missing"):
        open_checkpoint(rewrite(bf16, {}, {"num_experts": 10**12}))


def test_text_files_of_a_directory(bf16: toy.Toy, tmp_path: Path) -> None:
    text = open_checkpoint(str(bf16.path)).text
    assert text.tokenizer_json == bf16.path / "tokenizer.json"
    assert text.gguf is None
    folder = tmp_path / "copy"
    shutil.copytree(bf16.path, folder)
    for file in ("chat_template.jinja", "chat_template.json", "generation_config.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "of the config"}')
    assert open_checkpoint(str(folder)).text.chat_template == "of the config"
    (folder / "chat_template.json").write_text('{"chat_template": "of the json"}')
    assert open_checkpoint(str(folder)).text.chat_template == "of the json"
    (folder / "chat_template.jinja").write_text("of the file")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    text = open_checkpoint(str(folder)).text
    assert text.chat_template == "of the file"
    assert text.generation_config == {"eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        open_checkpoint(str(folder))


def test_b003_a_stale_copy_in_another_shard_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = toy.write_qwen3_moe(tmp_path / "toy", "bf16", shards=2)
    index = json.loads((made.path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.norm.weight"
    other = next(f for f in sorted(set(index.values())) if f != index[name])
    held = {n: made.stored[n] for n, f in index.items() if f == other}
    stale = Stored("BF16", made.stored[name].raw + np.uint16(7))
    for tensors in ({name: stale, **held}, {**held, name: stale}):  # whichever is read first
        (made.path / other).unlink()
        toy.write_safetensors(made.path / other, tensors)
        caplog.clear()
        checkpoint = open_checkpoint(str(made.path))
        check(checkpoint, made.weights)
        assert f"1 tensor is not used: {other}: tensor '{name}'" in caplog.text
