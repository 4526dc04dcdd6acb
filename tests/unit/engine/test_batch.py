"""A plan as tensors, by hand."""

import torch

from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch

CPU = torch.device("cpu")


def test_a_mixed_step():
    chunks = [
        ScheduledChunk(1, (7,), start=17, block_ids=(4, 2), sample=True),
        ScheduledChunk(2, (8, 9, 10), start=15, block_ids=(0, 5, 6), sample=False),
    ]
    tokens, batch = build_batch(chunks, 16, CPU)
    assert tokens.tolist() == [7, 8, 9, 10]
    assert batch.query_start.tolist() == [0, 1, 4]
    assert batch.context_lens.tolist() == [18, 18]
    assert batch.block_tables.tolist() == [[4, 2], [0, 5]]  # block 6 holds no token yet
    assert batch.positions.tolist() == [17, 15, 16, 17]
    assert batch.slots.tolist() == [2 * 16 + 1, 15, 5 * 16, 5 * 16 + 1]
    assert not batch.decode
    assert tokens.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
    assert batch.query_start.dtype == batch.context_lens.dtype == torch.int32
    assert batch.block_tables.dtype == torch.int32


def test_a_decode_step_pads_block_tables_with_zero():
    chunks = [
        ScheduledChunk(1, (7,), start=32, block_ids=(4, 2, 9), sample=True),
        ScheduledChunk(2, (8,), start=0, block_ids=(5,), sample=True),
    ]
    tokens, batch = build_batch(chunks, 16, CPU)
    assert batch.decode
    assert batch.block_tables.tolist() == [[4, 2, 9], [5, 0, 0]]
    assert batch.slots.tolist() == [9 * 16, 5 * 16]
    assert tokens.tolist() == [7, 8]


def test_one_token_of_prefill_is_a_decode_step_too():
    _, batch = build_batch([ScheduledChunk(1, (3,), 0, (2,), True)], 64, CPU)
    assert batch.decode
    assert batch.slots.tolist() == [128]
