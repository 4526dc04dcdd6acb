"""Scanning for NaN scales and the opt-in repair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.numeric import FORMATS
from headrace.formats.base import PackedTensor, dequantize, find_nan, zero_nan

HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)},
}
CASES = [(name, offset) for name, offsets in HALVES.items() for offset in offsets]


def clean(name: str, *lead: int, per_row: int = 3) -> torch.Tensor:
    """Blocks of random codes whose float16 scales are 1."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*lead, per_row, fmt.block_nbytes), dtype=np.uint8)
    for offset in HALVES[name]:
        raw[..., offset], raw[..., offset + 1] = 0x00, 0x3C
    return torch.from_numpy(raw.reshape(*lead, -1))


@pytest.mark.parametrize("half", [0x7E00, 0xFE00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize(("name", "offset"), CASES)
def test_b024_nan_half_is_found_and_repaired(name: str, offset: int, half: int) -> None:
    fmt = FORMATS[name]
    blocks = clean(name, 2, 6)
    packed = PackedTensor(name, (2, 6, 3 * fmt.block_weights), {"blocks": blocks})
    assert find_nan(packed) is None
    before = blocks.clone()
    assert zero_nan(packed) == 0
    assert torch.equal(blocks, before)

    at = fmt.block_nbytes + offset  # expert 1, row 4, block 1
    blocks[1, 4, at], blocks[1, 4, at + 1] = half & 255, half >> 8
    blocks[1, 5, at], blocks[1, 5, at + 1] = half & 255, half >> 8
    assert find_nan(packed) == (1 * 6 + 4) * 3 + 1
    good = dequantize(packed)
    assert zero_nan(packed) == 2
    assert find_nan(packed) is None
    repaired = dequantize(packed)
    cols = slice(fmt.block_weights, 2 * fmt.block_weights)
    assert not repaired[1, 4:, cols].any()
    good[1, 4:, cols] = 0
    assert torch.equal(repaired, good)


@pytest.mark.parametrize("name", sorted(HALVES))
def test_infinite_and_huge_scales_are_not_nan(name: str) -> None:
    blocks = clean(name, 4)
    for row, half in enumerate((0x7C00, 0xFC00, 0x7BFF, 0x8000)):
        for offset in HALVES[name]:
            blocks[row, offset], blocks[row, offset + 1] = half & 255, half >> 8
    packed = PackedTensor(name, (4, 3 * FORMATS[name].block_weights), {"blocks": blocks})
    assert find_nan(packed) is None


def test_strided_rows_count_their_own_blocks() -> None:
    """The up rows of an interleaved tensor: the damage in a gate row is not theirs."""
    blocks = clean("q8_0", 2, 8)
    blocks[1, 4, 34 + 1] = 0x7E
    gate, up = (PackedTensor("q8_0", (2, 4, 96), {"blocks": blocks[:, k::2]}) for k in (0, 1))
    assert find_nan(up) is None
    assert find_nan(gate) == (1 * 4 + 2) * 3 + 1
    assert zero_nan(gate) == 1
    assert blocks[1, 4, 35] == 0


def test_b024_e8m0() -> None:
    rng = np.random.default_rng(0)
    scales = torch.from_numpy(rng.integers(0, 255, (2, 3, 4), dtype=np.uint8))
    codes = torch.from_numpy(rng.integers(0, 256, (2, 3, 64), dtype=np.uint8))
    packed = PackedTensor("mxfp4", (2, 3, 128), {"codes": codes, "scales": scales})
    assert find_nan(packed) is None
    scales[1, 0, 2] = 255
    assert find_nan(packed) == (1 * 3 + 0) * 4 + 2
    assert zero_nan(packed) == 1
    assert find_nan(packed) is None
    assert not dequantize(packed)[1, 0, 64:96].any()

    raw = torch.cat((scales.view(2, 3, 4, 1), codes.view(2, 3, 4, 16)), dim=-1).view(2, 3, 68)
    packed = PackedTensor("mxfp4_gguf", (2, 3, 128), {"blocks": raw})
    assert find_nan(packed) is None
    raw[0, 2, 17] = 255
    assert find_nan(packed) == 2 * 4 + 1
    others = raw.clone()
    assert zero_nan(packed) == 1
    assert not dequantize(packed)[0, 2, 32:64].any()
    others[0, 2, 17:34] = 0
    assert torch.equal(raw, others)


def nvfp4() -> PackedTensor:
    rng = np.random.default_rng(0)
    parts = {
        "codes": torch.from_numpy(rng.integers(0, 256, (3, 4, 32), dtype=np.uint8)),
        "scales": torch.from_numpy(rng.integers(0, 127, (3, 4, 4), dtype=np.uint8)),
        "global_scale": torch.ones(3),
    }
    return PackedTensor("nvfp4", (3, 4, 64), parts)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_b024_e4m3_scale(byte: int) -> None:
    packed = nvfp4()
    assert find_nan(packed) is None
    packed.parts["scales"][2, 3, 1] = byte
    assert find_nan(packed) == (2 * 4 + 3) * 4 + 1
    assert zero_nan(packed) == 1
    assert not dequantize(packed)[2, 3, 16:32].any()
    assert find_nan(packed) is None


def test_b024_global_scale() -> None:
    packed = nvfp4()
    packed.parts["global_scale"][1] = float("nan")
    packed.parts["scales"][1, 0, 3] = 0x7F
    assert find_nan(packed) == 1 * 4 * 4
    assert zero_nan(packed) == 2
    assert not dequantize(packed)[1].any()
    assert dequantize(packed)[0].any()


def test_b024_fp8() -> None:
    codes = torch.full((2, 130, 200), 0x38, dtype=torch.uint8)
    scale = torch.ones(2, 2, 2)
    packed = PackedTensor("fp8_e4m3", (2, 130, 200), {"codes": codes, "scale": scale})
    assert find_nan(packed) is None
    scale[1, 1, 1] = float("nan")
    assert find_nan(packed) == (130 + 128) * 200 + 128
    codes[1, 129, 5] = 0xFF  # later than the block's first weight
    assert find_nan(packed) == (130 + 128) * 200 + 128
    codes[0, 3, 7] = 0x7F
    assert find_nan(packed) == 3 * 200 + 7
    assert zero_nan(packed) == 3
    assert find_nan(packed) is None
    values = dequantize(packed)
    assert not values[1, 128:, 128:].any()
    assert values[1, 128, 127] == 1
    assert values[0, 3, 7] == values[1, 129, 5] == 0

    tensor_scale = PackedTensor(
        "fp8_e4m3", (2, 130, 200), {"codes": codes, "scale": torch.tensor([1.0, float("nan")])}
    )
    assert find_nan(tensor_scale) == 130 * 200


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_b024_plain_floats(name: str) -> None:
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]
    data = torch.ones(3, 7, 10, dtype=dtype)
    packed = PackedTensor(name, (3, 7, 10), {"data": data})
    data[0, 0, 0] = float("inf")
    assert find_nan(packed) is None
    data[2, 6, 4] = float("nan")
    data[2, 6, 9] = -float("nan")
    assert find_nan(packed) == 204
    assert zero_nan(packed) == 2
    assert find_nan(packed) is None
    assert data[2, 6, 4] == 0
    assert data[0, 0, 0] == float("inf")
