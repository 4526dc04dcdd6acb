"""The request block: fields apart, aligned, and large enough."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.request_block import request_block


def test_fields_follow_each_other_on_cache_lines() -> None:
    block = request_block(max_tokens=16, top_k=4, num_experts=128, num_slices=5, hidden=2880)
    assert (block.seq, block.ack, block.abort) == (0, 64, 128)
    assert (block.ready, block.header, block.items, block.ready_parts) == (192, 256, 320, 12)
    assert block.max_pairs == 64
    assert block.max_items == 64 * 5
    assert block.pair_token == 320 + 320 * 16
    assert block.pair_weight == block.pair_token + 256
    assert block.x == block.pair_weight + 256
    assert block.out == block.x + 16 * 2880 * 4
    assert block.nbytes == block.out + 16 * 2880 * 4


def test_no_more_items_than_slices_of_all_experts() -> None:
    block = request_block(max_tokens=3, top_k=4, num_experts=8, num_slices=2, hidden=33)
    assert (block.max_items, block.max_pairs) == (16, 12)
    offsets = (block.items, block.pair_token, block.pair_weight, block.x, block.out, block.nbytes)
    assert all(offset % 64 == 0 for offset in offsets)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="top_k is 0"):
        request_block(max_tokens=1, top_k=0, num_experts=8, num_slices=2, hidden=32)
