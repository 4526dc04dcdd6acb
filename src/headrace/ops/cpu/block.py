"""Halves of a decoder layer in one native call each, for decoding.

Operation by operation a layer costs ten calls from Python, about 3 us each with warm caches and twice
that after a step has filled them: 1 to 2 ms of a SmolLM2 step of 10 ms (2026-11, Zen 4, 2 cores). The
native code makes the same calls in the same order, so results are the same bits.
"""

from __future__ import annotations

from array import array

import torch

from headrace.core.errors import InternalError
from headrace.ops.cpu import _native
from headrace.ops.cpu.arguments import address, checked, rows_of
from headrace.ops.cpu.attention import native_batch, native_cache
from headrace.ops.cpu.linear import activation_number
from headrace.ops.cpu.matrix import handle
from headrace.ops.records import AttentionBatch, AttentionBlock, DenseBlock, LayerKV

_BLOCK = "_cpu_block"
_SLOTS = "_cpu_slots"
# enum class BlockFault, native/ops.h
_FAULTS = ("", "a position beyond the rotary table", "a slot outside the cache", "a missing block")


def _attention(block: AttentionBlock) -> _native.AttentionBlock:
    found = block.__dict__.get(_BLOCK)
    if found is None:
        heads, kv_heads, dim = block.heads
        rows = (heads * dim, kv_heads * dim, kv_heads * dim, block.norm.numel())
        matrices = [handle(w) for w in block.weights]
        cols = (block.norm.numel(),) * 3 + (heads * dim,)
        if [(m.rows, m.cols) for m in matrices] != list(zip(rows, cols)):
            shapes = [list(w.shape) for w in block.weights]
            raise InternalError(f"attention block: q, k, v, o are {shapes}, heads {block.heads}")
        norms = (block.q_norm, block.k_norm)
        widths = [1 if n is None else n.numel() for n in norms]
        if any(r % w for r, w in zip(rows, widths)):
            raise InternalError(f"attention block: norms of {widths} on rows of {rows[:2]}")
        if heads % kv_heads or (block.window is not None and block.window < 1):
            raise InternalError(f"attention block: heads {block.heads}, window {block.window}")
        cos, sin = block.table.cos, block.table.sin
        positions, half = cos.shape
        found = _native.make_attention_block(
            address(block.norm, block.norm.numel(), "norm"),
            block.eps,
            matrices,
            [address(b, r, "bias") for b, r in zip(block.biases, rows, strict=True)],
            [address(n, w, "q_norm or k_norm") for n, w in zip(norms, widths)],
            widths,
            address(cos, positions * half, "cos"),
            address(sin, positions * half, "sin"),
            positions,
            half,
            block.table.interleaved,
            [heads, kv_heads, dim],
            block.scale,
            block.window or 0,
            address(block.sinks, heads, "sinks"),
        )
        block.__dict__[_BLOCK] = found
    return found


def _slots(batch: AttentionBatch, rows: int) -> int:
    found = batch.__dict__.get(_SLOTS)
    if found is None:
        found = batch.__dict__[_SLOTS] = checked(batch.slots, torch.int64, (rows,), "slots")
    return found.data_ptr()


def attention_block(
    x: torch.Tensor,
    block: AttentionBlock,
    cache: LayerKV,
    batch: AttentionBatch,
    seconds: array[float] | None = None,
) -> torch.Tensor:
    """x + o(attention(norm(x))), keys and values appended first: float32 [T, D] -> same.

    seconds: doubles, one for each of ``registry.BLOCKS["attention_block"]``, that grow by the parts' times.
    """
    native = _attention(block)
    x = rows_of(x, block.norm.numel(), "x")
    kv = native_cache(cache)
    if kv[2:] != block.heads[1:]:
        raise InternalError(f"attention block: heads {block.heads}, cache of {kv[2:]}")
    starts, tables, positions, sequences, width, rows = native_batch(batch)
    if rows != x.shape[0]:
        raise InternalError(f"attention block: x has {x.shape[0]} rows, the batch {rows}")
    out = torch.empty_like(x)
    fault = _native.attention_block(
        native,
        kv[0],
        x.data_ptr(),
        out.data_ptr(),
        rows,
        positions,
        _slots(batch, rows),
        starts,
        tables,
        sequences,
        width,
        _laps(seconds, 6),
    )
    if fault:
        raise InternalError(
            f"attention block: {_FAULTS[fault]}; positions {batch.positions}, slots {batch.slots}, "
            f"tables {batch.block_tables}"
        )
    return out


def _laps(seconds: array[float] | None, parts: int) -> int:
    """The address of ``parts`` doubles, or 0."""
    if seconds is None:
        return 0
    where, length = seconds.buffer_info()
    if length != parts or seconds.typecode != "d":
        raise InternalError(f"seconds: {length} of {seconds.typecode}, expected {parts} doubles")
    return where


def dense_block(
    x: torch.Tensor, block: DenseBlock, seconds: array[float] | None = None
) -> torch.Tensor:
    """x + down(act(gate(norm(x)), up(norm(x)))): float32 [T, D] -> same.

    seconds: doubles, one for each of ``registry.BLOCKS["dense_block"]``, that grow by the parts' times.
    """
    native = block.__dict__.get(_BLOCK)
    if native is None:
        gate, up, down = handle(block.gate), handle(block.up), handle(block.down)
        size = block.norm.numel()
        shapes = [(m.rows, m.cols) for m in (gate, up, down)]
        if shapes != [(gate.rows, size), (gate.rows, size), (size, gate.rows)]:
            raise InternalError(f"dense block: norm of {size}, gate, up and down {shapes}")
        act = block.act
        native = block.__dict__[_BLOCK] = _native.make_dense_block(
            address(block.norm, size, "norm"),
            block.eps,
            gate,
            up,
            down,
            activation_number(act),
            act.alpha,
            act.limit,
        )
    x = rows_of(x, block.norm.numel(), "x")
    out = torch.empty_like(x)
    _native.dense_block(native, x.data_ptr(), x.shape[0], out.data_ptr(), _laps(seconds, 3))
    return out
