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
SOURCES = ("sealed_hopper.cuh", "sealed_rest.cuh", "sealed_decode.cu", "sealed_merge.cuh")
_MERGE_THREADS = 512


@dataclass(frozen=True)
class Shape:
    """How the work is cut, and compile-time choices of the kernel.

    min_part, long_part: pages of a part at least, and before a row has more than few_parts
    max_parts: of a row at most, 511
    warps: of a block, each with a part; stages: pages that a warp holds; blocks: of a multiprocessor
        (H200, 2026-11-30, batch 1 at 128K / 8 at 32K in us: 3 stages 60.0 / 121.8; 4 62.5 / 126.3; 2 stages
        and 2 blocks 66.1 / 127.7; 8 warps, 2 stages, 128 parts 64.8 / 126.6)
    overlaps: each kernel is started before the one ahead of it is done, and waits for it itself
    """

    min_part: int = 2
    long_part: int = 8
    few_parts: int = 64
    max_parts: int = 64
    warps: int = 4
    stages: int = 3
    blocks: int = 1
    overlaps: bool = True


USUAL = Shape()


class Cut(ctypes.Structure):
    """``Cut`` of the source."""

    _fields_ = tuple((n, ctypes.c_int) for n in ("min_part", "long_part", "few_parts", "max_parts"))


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
            "window", "kv_heads", "stride_table", "stride_pages", "num_shared", "open_offset", "slots",
        )),
        ("cut", Cut),
    )  # fmt: skip


def shared_nbytes(shape: Shape, rank: int) -> int:
    """Bytes of the kernel's ``Shared``."""
    page = PAGE * (DIM // 2 + DIM + DIM // 16 + rank) + 2 * DIM + 16
    lane = shape.stages * (page + 8)
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
        f"BLOCKS={shape.blocks}", f"SHARED_NBYTES={shared_nbytes(shape, rank)}",
    )  # fmt: skip


def source() -> str:
    """The whole program."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in SOURCES)


@cache
def binary(capability: tuple[int, int], group: int, rank: int, shape: Shape) -> bytes:
    """The compiled program for so many query heads of a key head."""
    return cuda_source.compiled(source(), capability, defines(group, rank, shape))


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
    shape: Shape = USUAL,
) -> torch.Tensor:
    """``sealed_decode.sealed_attention_decode`` of operands that ``takes`` says yes to."""
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
    cut = Cut(shape.min_part, shape.long_part, shape.few_parts, shape.max_parts)
    tensors = (
        q, *parts_of(cache), cache.open_keys, cache.open_values, batch.block_tables, where.pages,
        batch.context_lens, sums, mixed,
    )  # fmt: skip
    call = _Call(
        *(t.data_ptr() for t in tensors), scale * LOG2_E, seen, kv_heads,
        batch.block_tables.stride(0), where.pages.stride(0), cache.num_shared, cache.open_offset,
        slots, cut,
    )  # fmt: skip
    kernels = _kernels(device, heads // kv_heads, cache.rank, shape)
    kernels["sealed_decode"].launch(
        (blocks, kv_heads, rows), 32 * shape.warps + 32, call, overlaps=shape.overlaps
    )
    out = torch.empty_like(q)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (sums, mixed)]
    pointers += [ctypes.c_void_p(0 if sinks is None else sinks.data_ptr())]
    pointers += [ctypes.c_void_p(t.data_ptr()) for t in (out, batch.context_lens)]
    numbers = (ctypes.c_int(seen), cut, ctypes.c_int(slots), ctypes.c_int(sinks is not None))
    kernels["sealed_merge"].launch(
        (heads, rows, 1),
        _MERGE_THREADS,
        *pointers,
        *numbers,
        overlaps=shape.overlaps,
    )
    return out
