"""Launches ``sealed_decode.cu``: nvfp4k-fp8v, heads of 128, pages of 64, on GPUs with bulk copies.

Triton's kernel for the same (``sealed_decode``) serves every other case.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headrace.ops.records import AttentionBatch, SealedKV
from headrace.ops.triton import cuda_source
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.sealed_append import open_of, parts_of
from headrace.ops.triton.softmax import LOG2_E

DIM, PAGE, MAX_GROUP = 128, 64, 8
_SOURCE = Path(__file__).with_name("sealed_decode.cu")
_MERGE_THREADS = 512


@dataclass(frozen=True)
class Shape:
    """How the work is cut, and compile-time choices of the kernel.

    min_part: pages of a part at least; max_parts: of a row at most, 511
    warps: of a block, each with a part; stages: pages that a warp holds; blocks: of a multiprocessor
    overlaps: merging is started before the parts are done, and waits for them itself
    unpack: 1 by E4M3 conversions, 0 by bits put where float16 has them
    """

    min_part: int = 4
    max_parts: int = 128
    warps: int = 4
    stages: int = 2
    blocks: int = 2
    unpack: int = 1
    tau: float = 8.0
    overlaps: bool = False


SHAPE = [Shape()]  # the only entry is what launches use; the benchmark's sweep puts others there


class _Call(ctypes.Structure):
    """``Call`` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "key_codes", "key_scales", "key_residuals", "key_refs", "value_codes", "page_scales",
            "first_keys", "directions", "open_keys", "open_values", "tables", "open_pages",
            "context_lens", "sums", "mixed",
        )),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in (
            "window", "kv_heads", "stride_table", "stride_pages", "num_shared", "open_offset",
            "min_part", "max_parts", "slots",
        )),
    )  # fmt: skip


def shared_nbytes(shape: Shape, rank: int) -> int:
    """Bytes of the kernel's ``Shared``."""
    page = PAGE * (DIM // 2 + DIM + DIM // 16 + rank)
    lane = shape.stages * page + 16 * 8 * 4 + 16 * 8 + 8 * shape.stages
    lane = -(-lane // 128) * 128
    rest = 8 * DIM * 4 + 8 * 4 * 4 + 32 * 8 * 4
    return -(-(shape.warps * lane + rest) // 128) * 128


def takes(q: torch.Tensor, cache: SealedKV) -> bool:
    """Whether the kernel serves these operands on this device."""
    group = q.shape[1] // cache.key_codes.shape[1]
    return (
        not interpreted()
        and q.device.type == "cuda"
        and cache.key_scales is not None
        and cache.first_keys is not None
        and (cache.head_dim, cache.block_tokens) == (DIM, PAGE)
        and cache.rank in (0, 4)
        and group <= MAX_GROUP
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and cuda_source.available()
    )


def defines(group: int, rank: int, shape: Shape) -> tuple[str, ...]:
    """What the source is compiled with."""
    return (
        f"GROUP={group}", f"RANK={rank}", f"STAGES={shape.stages}", f"WARPS={shape.warps}",
        f"BLOCKS={shape.blocks}", f"UNPACK={shape.unpack}", f"TAU={shape.tau:f}f",
        f"SHARED_NBYTES={shared_nbytes(shape, rank)}",
    )  # fmt: skip


@cache
def binary(capability: tuple[int, int], group: int, rank: int, shape: Shape) -> bytes:
    """The compiled program for so many query heads of a key head."""
    source = _SOURCE.read_text(encoding="utf-8")
    return cuda_source.compiled(source, capability, defines(group, rank, shape))


@cache
def _kernels(device: int, group: int, rank: int, shape: Shape) -> dict[str, cuda_source.Kernel]:
    program = binary(torch.cuda.get_device_capability(device), group, rank, shape)
    nbytes = {"sealed_decode": shared_nbytes(shape, rank), "sealed_merge": 0}
    return cuda_source.load(program, nbytes)


@cache
def _num_multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode(
    q: torch.Tensor,
    cache: SealedKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``sealed_decode.sealed_attention_decode`` of operands that ``takes`` says yes to."""
    shape = SHAPE[0]
    q = q.contiguous()
    rows, heads, dim = q.shape
    kv_heads = cache.key_codes.shape[1]
    where = open_of(batch)
    device = q.device.index or 0
    room = batch.block_tables.shape[1]
    if window is not None:
        room = min(room, -(-window // PAGE) + 1)
    parts = min(-(-room // shape.min_part), shape.max_parts)
    slots = parts + 1  # the first is that of keys in bfloat16
    sums = torch.empty(rows, heads, slots, 2, device=q.device)
    mixed = torch.empty(rows, heads, slots, dim, device=q.device)
    resident = shape.blocks * _num_multiprocessors(device)
    blocks = max(min(-(-parts // shape.warps), resident // (rows * kv_heads)), 1)
    seen = window or 2**30
    tensors = (
        q, *parts_of(cache), cache.open_keys, cache.open_values, batch.block_tables, where.pages,
        batch.context_lens, sums, mixed,
    )  # fmt: skip
    call = _Call(
        *(t.data_ptr() for t in tensors), scale * LOG2_E, seen, kv_heads,
        batch.block_tables.stride(0), where.pages.stride(0), cache.num_shared, cache.open_offset,
        shape.min_part, shape.max_parts, slots,
    )  # fmt: skip
    kernels = _kernels(device, heads // kv_heads, cache.rank, shape)
    kernels["sealed_decode"].launch((blocks, kv_heads, rows), 32 * shape.warps + 32, call)
    out = torch.empty_like(q)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (sums, mixed)]
    pointers += [ctypes.c_void_p(0 if sinks is None else sinks.data_ptr())]
    pointers += [ctypes.c_void_p(t.data_ptr()) for t in (out, batch.context_lens)]
    numbers = (seen, shape.min_part, shape.max_parts, slots, int(sinks is not None))
    kernels["sealed_merge"].launch(
        (heads, rows, 1),
        _MERGE_THREADS,
        *pointers,
        *(ctypes.c_int(n) for n in numbers),
        overlaps=shape.overlaps,
    )
    return out
