"""Parts that do not agree with the logical shape are refused: format, part, both sides named."""

from __future__ import annotations

import pytest
import torch

from headrace.core.errors import CheckpointError, UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.formats.base import PackedTensor, check_parts, dequantize, load_formats

BYTE = torch.uint8


def zeros(*shape: int, dtype: torch.dtype = BYTE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_every_format_of_the_table_is_implemented() -> None:
    assert set(load_formats()) == set(FORMATS)
    assert all(name == record.name for name, record in load_formats().items())


def test_unknown_format_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match="'q1_x' is not implemented") as caught:
        dequantize(PackedTensor("q1_x", (1, 32), {}))
    assert "mxfp4_gguf" in str(caught.value.hint)


BAD = {
    "missing part": (
        PackedTensor("mxfp4", (4, 64), {"codes": zeros(4, 32)}),
        r"mxfp4 .* \[4, 64\] has the parts \['codes'\], expected \['codes', 'scales'\]",
    ),
    "wrong dtype": (
        PackedTensor("bf16", (4, 64), {"data": zeros(4, 64, dtype=torch.float16)}),
        "bf16 .* part 'data' has dtype float16, expected bfloat16",
    ),
    "wrong shape": (
        PackedTensor("q8_0", (4, 64), {"blocks": zeros(4, 34)}),
        r"q8_0 .* part 'blocks' has shape \[4, 34\], expected \[4, 68\]",
    ),
    "cut block": (
        PackedTensor("q4_k", (4, 300), {"blocks": zeros(4, 144)}),
        r"q4_k tensor of shape \[4, 300\]: a row must be a multiple of 256",
    ),
    "scale grid": (
        PackedTensor("fp8_e4m3", (130, 64), {"codes": zeros(130, 64), "scale": torch.ones(1, 1)}),
        r"fp8_e4m3 .* part 'scale' has shape \[1, 1\], expected \[\] or \[2, 1\]",
    ),
    "scale per matrix": (
        PackedTensor("fp8_e4m3", (64,), {"codes": zeros(64), "scale": torch.ones(1)}),
        r"fp8_e4m3 tensor of shape \[64\]: expected at least two dimensions",
    ),
    "one multiplier for all experts": (
        PackedTensor(
            "nvfp4",
            (2, 4, 32),
            {
                "codes": zeros(2, 4, 16),
                "scales": zeros(2, 4, 2),
                "global_scale": torch.tensor(1.0),
            },
        ),
        r"nvfp4 .* part 'global_scale' has shape \[\], expected \[2\]",
    ),
    "strided columns": (
        PackedTensor("f32", (4, 8), {"data": torch.zeros(4, 16)[:, ::2]}),
        "f32 tensor: part 'data' has stride 2 along its last dimension, expected 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_disagreeing_parts_are_refused(case: str) -> None:
    packed, message = BAD[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        check_parts(packed)
    assert caught.value.hint
    with pytest.raises(CheckpointError):
        dequantize(packed)
