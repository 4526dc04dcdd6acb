"""Blocks taken apart into codes and scales, and put together again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.block_planes import PACKED_FORMATS, SCALES_AT
from headrace.formats.base import PackedTensor, dequantize, in_blocks
from headrace.formats.planes import in_planes
from tests.fixtures.cpu_oracle import random_packed


@pytest.mark.parametrize("name", sorted(PACKED_FORMATS))
def test_planes_hold_the_same_numbers(name: str):
    packed = random_packed(name, 3, 512, np.random.default_rng(4))
    apart = in_planes(packed)
    assert apart.nbytes == packed.nbytes
    assert torch.equal(dequantize(apart), dequantize(packed))
    assert in_planes(apart) is apart
    if name in SCALES_AT:
        assert torch.equal(in_blocks(apart).parts["blocks"], packed.parts["blocks"])
    else:
        assert in_blocks(packed) is packed


def test_where_the_bytes_of_two_blocks_go():
    """Q8_0: two bytes of scale, then 32 codes. Q6_K: 192 bytes of codes, then 18 of scales."""
    row = torch.arange(68, dtype=torch.uint8)[None]
    parts = in_planes(PackedTensor("q8_0", (1, 64), {"blocks": row})).parts
    assert parts["scales"].tolist() == [[0, 1, 34, 35]]
    assert parts["codes"].tolist() == [[*range(2, 34), *range(36, 68)]]
    row = torch.arange(210, dtype=torch.uint8)[None]
    parts = in_planes(PackedTensor("q6_k", (1, 256), {"blocks": row})).parts
    assert parts["codes"].tolist() == [list(range(192))]
    assert parts["scales"].tolist() == [list(range(192, 210))]
