"""NaN block scales: found where they are, refused, or set to zero when asked."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import RawTensor
from headrace.checkpoint.scales import CheckedTensors, find_nan_scale, zero_nan_scales
from headrace.core.errors import CheckpointError
from headrace.core.numeric import FORMATS
from headrace.formats import base as formats
from headrace.formats.base import PackedTensor
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops import registry
from tests.fixtures.gguf_bytes import tiny_llama

HALF_NAN = np.array([math.nan], np.float16).view(np.uint8)

# Where llama.cpp's block structures (ggml-common.h) have their float16 fields.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip


def blocks_of(name: str, rows: int = 3, blocks: int = 4) -> RawTensor:
    """A tensor whose codes are all ones (NaN as float16 or E8M0) and whose scales are 1."""
    form = FORMATS[name]
    data = np.full((rows, blocks, form.block_nbytes), 0xFF, np.uint8)
    for at in HALVES.get(name, ()):
        data[..., at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    if name == "mxfp4_gguf":
        data[..., 0] = 127
    shape = (rows, blocks * form.block_weights)
    return RawTensor(name, name, shape, {"blocks": data.reshape(rows, -1)}, f"file: {name}")


@pytest.mark.parametrize(("name", "at"), [(n, a) for n, offsets in HALVES.items() for a in offsets])
def test_b024_every_float16_field_of_every_block_type(name: str, at: int) -> None:
    raw = blocks_of(name)
    assert find_nan_scale(raw) is None
    view = raw.parts["blocks"].reshape(12, -1)
    for block in (5, 7):
        view[block, at : at + 2] = HALF_NAN
    before = view.copy()
    assert find_nan_scale(raw) == 5
    assert zero_nan_scales(raw) == 2
    assert find_nan_scale(raw) is None
    for field in HALVES[name]:  # scale and minimum, so that the block stands for zeros
        before[[5, 7], field : field + 2] = 0
    np.testing.assert_array_equal(view, before)


def test_b024_infinity_is_no_nan() -> None:
    raw = blocks_of("q8_0")
    raw.parts["blocks"][1, :2] = np.array([math.inf], np.float16).view(np.uint8)
    assert find_nan_scale(raw) is None


def test_b024_mxfp4_blocks_become_zero_as_a_whole() -> None:
    # E8M0 has no zero: with scale byte 0 (2^-127) the codes have to be zero too.
    inline = blocks_of("mxfp4_gguf")
    view = inline.parts["blocks"].reshape(12, 17)
    view[9, 0] = 255
    assert find_nan_scale(inline) == 9
    assert zero_nan_scales(inline) == 1
    assert not view[9].any()
    assert (view[8][1:] == 0xFF).all()
    parts = {"codes": np.full((2, 3, 32), 0xFF, np.uint8), "scales": np.full((2, 3, 2), 127, "u1")}
    apart = RawTensor("x", "mxfp4", (2, 3, 64), parts, "file: x")
    assert find_nan_scale(apart) is None
    parts["scales"][1, 0, 1] = 255
    assert find_nan_scale(apart) == 7
    assert zero_nan_scales(apart) == 1
    assert parts["scales"][1, 0, 1] == 0
    assert not parts["codes"][1, 0, 16:].any()
    assert parts["codes"][1, 0, :16].all()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_b024_nvfp4_block_and_global_scales(byte: int) -> None:
    parts: dict[str, Any] = {
        "codes": np.zeros((2, 4, 16), np.uint8),
        "scales": np.full((2, 4, 2), 0x7E, np.uint8),
        "global_scale": np.ones(2, np.float32),
    }
    raw = RawTensor("x", "nvfp4", (2, 4, 32), parts, "file: x")
    assert find_nan_scale(raw) is None
    parts["scales"][1, 2, 0] = byte
    assert find_nan_scale(raw) == 8 + 4
    parts["global_scale"][1] = math.nan
    assert find_nan_scale(raw) == 8  # the expert's first block
    assert zero_nan_scales(raw) == 2
    assert find_nan_scale(raw) is None
    assert parts["global_scale"].tolist() == [1.0, 0.0]


def test_b024_fp8_scales() -> None:
    parts = {"codes": np.zeros((200, 300), np.uint8), "scale": np.ones((2, 3), np.float32)}
    raw = RawTensor("x", "fp8_e4m3", (200, 300), parts, "file: x")
    assert find_nan_scale(raw) is None
    parts["scale"][1, 2] = math.nan
    assert find_nan_scale(raw) == 5
    with pytest.raises(CheckpointError, match=r"block 5 \(rows 128 on, columns 256 on\) is NaN"):
        CheckedTensors({"x": raw})["x"]
    single = {"codes": parts["codes"], "scale": np.array(math.nan, np.float32)}
    whole = RawTensor("x", "fp8_e4m3", (200, 300), single, "file: x")
    assert find_nan_scale(whole) == 0
    assert zero_nan_scales(whole) == 1
    assert single["scale"] == 0


def test_floats_are_weights_and_not_scanned() -> None:
    for name, dtype in (("f32", np.float32), ("bf16", np.uint16)):
        data = np.full((2, 2), -1).astype(dtype)  # uint16 of ones: NaN in bfloat16
        raw = RawTensor("x", name, (2, 2), {"data": data}, "file: x")
        assert find_nan_scale(raw) is None
        assert zero_nan_scales(raw) == 0


def damaged_file(path: Path) -> Path:
    """One block of Q8_0 with d = NaN and quants 0, in row 5 of a matrix of two blocks a row."""
    file = tiny_llama()
    down = next(t for t in file.tensors if t.name == "blk.0.ffn_down.weight")
    raw = bytearray(down.data)
    raw[34 * 11 : 34 * 12] = HALF_NAN.tobytes() + bytes(32)
    down.data = bytes(raw)
    path.write_bytes(file.to_bytes())
    return path


def test_b024_a_nan_scale_is_refused_by_tensor_and_block(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(damaged_file(tmp_path / "x.gguf")))
    assert checkpoint.tensors["layers.0.up"].format == "q8_0"  # others can be taken
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.tensors["layers.0.down"]
        message = str(caught.value)
        assert "x.gguf: blk.0.ffn_down.weight" in message
        assert "block 11 (row 5, columns 32 on) is NaN" in message
        assert "--repair-nan-scales" in message
    with pytest.raises(CheckpointError):
        list(checkpoint.tensors.values())


def test_b024_repair_is_opt_in_reported_and_leaves_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = damaged_file(tmp_path / "x.gguf")
    before = path.read_bytes()
    checkpoint = open_checkpoint(str(path), repair_nan_scales=True)
    tensors = checkpoint.tensors
    assert isinstance(tensors, CheckedTensors)
    assert tensors.repairs == ()
    with caplog.at_level(logging.WARNING):
        block = tensors["layers.0.down"].parts["blocks"].reshape(-1, 34)[11]
    assert not block.any()
    (repair,) = tensors.repairs
    assert (repair.tensor, repair.block, repair.num_blocks) == ("layers.0.down", 11, 1)
    assert "1 block with a NaN scale set to zero, the first is block 11" in caplog.text
    assert path.read_bytes() == before
    tensors["layers.0.down"]
    assert len(tensors.repairs) == 1  # scanned once


def test_looking_at_names_and_sizes_scans_nothing(tmp_path: Path) -> None:
    tensors = open_checkpoint(str(damaged_file(tmp_path / "x.gguf"))).tensors
    assert isinstance(tensors, CheckedTensors)
    assert "layers.0.down" in tensors
    assert "layers.0.q_bias" not in tensors
    assert tensors.get("layers.0.q_bias") is None
    assert len(list(tensors)) == len(tensors) == 11
    assert sum(t.nbytes for t in tensors.unchecked.values()) > 0


def packed(raw: RawTensor) -> PackedTensor:
    parts = {key: torch.from_numpy(part) for key, part in raw.parts.items()}
    return PackedTensor(raw.format, raw.shape, parts)


def nvfp4_of(rng: np.random.Generator) -> RawTensor:
    parts: dict[str, Any] = {
        "codes": rng.integers(0, 256, (4, 8, 16), dtype=np.uint8),
        "scales": rng.integers(0, 0x7F, (4, 8, 2), dtype=np.uint8),
        "global_scale": np.ones(4, np.float32),
    }
    parts["scales"].reshape(-1)[rng.integers(0, 64, 2)] = 0x7F
    parts["global_scale"][rng.integers(0, 4)] = math.nan
    return RawTensor("x", "nvfp4", (4, 8, 32), parts, "file: x")


def inline_of(name: str, rng: np.random.Generator) -> RawTensor:
    raw = blocks_of(name)
    view = raw.parts["blocks"].reshape(12, -1)
    for block in rng.integers(0, 12, 3):
        at = rng.choice(HALVES.get(name, (0,)))
        view[block, at : at + 2] = 0xFF
    return raw


@pytest.mark.parametrize("name", [*HALVES, "mxfp4_gguf", "nvfp4"])
def test_b024_agrees_with_the_formats_own_scan(name: str) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        raw = nvfp4_of(rng) if name == "nvfp4" else inline_of(name, rng)
        assert find_nan_scale(raw) == formats.find_nan(packed(raw))
        twin = copy.deepcopy(raw)
        zero_nan_scales(raw)
        formats.zero_nan(packed(twin))
        for key, part in raw.parts.items():
            np.testing.assert_array_equal(part, twin.parts[key])


def test_b024_loading_a_model_meets_the_check(tmp_path: Path) -> None:
    path = str(damaged_file(tmp_path / "x.gguf"))
    ops = registry.resolve(("reference",))
    with pytest.raises(CheckpointError, match=r"ffn_down\.weight: the scale of block 11"):
        load_model(open_checkpoint(path), ops, HostDevice())
    checkpoint = open_checkpoint(path, repair_nan_scales=True)
    load_model(checkpoint, ops, HostDevice())
    assert isinstance(checkpoint.tensors, CheckedTensors)
    assert len(checkpoint.tensors.repairs) == 1
