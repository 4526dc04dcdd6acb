"""The past laid out row by row, and prefill over it, beside what pages hold and the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.kv_formats import FIRST_TOKENS
from headrace.ops import reference
from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.reference.sealing import pages_of, read_keys, read_values
from headrace.ops.registry import resolve
from tests.fixtures.kernel_cases import moved
from tests.fixtures.sealed_cases import sealed_case
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
TWINS = {op.name: op.function for op in reference.OPS}
DIM, TILE = 128, 128


@pytest.mark.parametrize(("kv_format", "rank"), [("fp8", 0), ("nvfp4k-fp8v", 4)])
def test_sealed_pages_are_put_together(kv_format: str, rank: int):
    """Full pages in 16 bits, first keys as they came, zeros up to the end of a tile."""
    from headrace.ops.triton.control import unpack_instructions
    from headrace.ops.triton.prefill_layout import sealed_layout_kernel
    from headrace.ops.triton.sealed_append import parts_of

    page, tokens = 64, [3 * 64 + 9, 70]
    case = sealed_case(kv_format, tokens, kv_heads=2, dim=DIM, page=page, rank=rank)
    case.fill(tokens)
    batch = case.batch([(s, 0, n) for s, n in enumerate(tokens)])
    cache, there = moved((case.cache, batch), DEVICE)
    size = (2, 2, 256, DIM)
    keys = torch.full(size, float("nan"), device=DEVICE, dtype=torch.float16)
    values = torch.full(size, float("nan"), device=DEVICE, dtype=torch.bfloat16)
    sealed_layout_kernel[(4, 2, 2)](
        *parts_of(cache), there.block_tables, there.query_start, there.context_lens, keys, values,
        2**30, there.block_tables.stride(0), 256,
        NVFP4=rank > 0, RANK=rank, FIRST=FIRST_TOKENS if rank else 0, PAGE=page, DIM=DIM, TILE=TILE,
        UNPACK=unpack_instructions(),
    )  # fmt: skip
    for s, n in enumerate(tokens):
        full = n // page
        blocks = case.tables[s, :full].long()
        pages = pages_of(case.cache, blocks)
        wanted = read_keys(pages, case.cache.directions, torch.float64)
        if rank:
            wanted[0, :, :FIRST_TOKENS] = case.cache.first_keys[blocks[0]].double()
        wanted = wanted.transpose(0, 1).reshape(2, full * page, DIM)
        found = keys[s, :, : full * page].cpu().double()
        # Half a unit of the last of 11 bits, and float32's error of the terms.
        assert bool(((found - wanted).abs() <= 2**-11 * wanted.abs() + 1e-4).all())
        wanted = read_values(pages, torch.float64).transpose(0, 1).reshape(2, full * page, DIM)
        assert torch.equal(values[s, :, : full * page].cpu().double(), wanted)
        end = -(-n // TILE) * TILE
        assert not keys[s, :, full * page : end].any()
        assert not values[s, :, full * page : end].any()


def test_open_pages_lie_at_their_own_tiles():
    """A chunk that starts within a page and a tile; rows of other pages and beyond the end are zeros."""
    from headrace.ops.triton.prefill_layout import open_layout_kernel

    page, start, tokens = 64, 150, 300
    case = sealed_case("nvfp4k-fp8v", [tokens], kv_heads=2, dim=DIM, page=page)
    case.fill([tokens])
    batch = case.batch([(0, start, tokens)])
    cache, there = moved((case.cache, batch), DEVICE)
    room = tokens - start + 2 * TILE
    keys = torch.full((2, room, DIM), float("nan"), device=DEVICE, dtype=torch.float16)
    values = keys.bfloat16()
    open_layout_kernel[(-(-room // page), 2, 1)](
        cache.open_keys, cache.open_values, there.open.pages, there.query_start, there.context_lens,
        keys, values, there.open.pages.stride(0), cache.num_shared, cache.open_offset, room,
        PAGE=page, DIM=DIM, TILE=TILE,
    )  # fmt: skip
    k, v = (x[0].transpose(0, 1).bfloat16() for x in (case.k, case.v))
    for found, given in ((keys, k.half()), (values, v)):
        wanted = torch.zeros(2, 2 * TILE, DIM, dtype=given.dtype)
        wanted[:, : tokens - TILE] = given[:, TILE:tokens]
        assert torch.equal(found[:, : 2 * TILE].cpu(), wanted)


def bf16_case(spans, kv_heads: int) -> tuple[LayerKV, AttentionBatch]:
    rng = torch.Generator().manual_seed(1)
    counts = [-(-end // 32) for _, _, end in spans]
    size = (sum(counts), kv_heads, 32, DIM)
    order = iter(torch.randperm(sum(counts), generator=rng).tolist())
    tables = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    for s, count in enumerate(counts):
        tables[s, :count] = torch.tensor([next(order) for _ in range(count)])
    lengths = [end - begin for _, begin, end in spans]
    batch = AttentionBatch(
        query_start=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        context_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
        block_tables=tables,
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in spans]),
        slots=torch.zeros(sum(lengths), dtype=torch.int64),
        decode=False,
    )
    return LayerKV(*(torch.randn(size, generator=rng).bfloat16() for _ in range(2))), batch


needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
CHUNKS = [
    # (sequence, first position, one past the last), window
    ([(0, 0, 640)], None),
    ([(0, 100, 1500), (1, 0, 900)], None),
    ([(0, 1000, 2000)], 300),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kv_format", "rank"), [("bf16", 0), ("fp8", 0), ("nvfp4k-fp8v", 4)])
@pytest.mark.parametrize(("spans", "window"), CHUNKS)
def test_prefill_over_a_laid_out_past(kv_format: str, rank: int, spans, window):
    """Whole prompts and chunks that start within pages and tiles, ragged, windows, sinks."""
    from headrace.ops.triton.prefill_layout import takes

    heads, kv_heads = 8, 2
    if kv_format == "bf16":
        cache, batch = bf16_case(spans, kv_heads)
        exact, name = LayerKV(cache.keys.double(), cache.values.double()), "attention_prefill"
    else:
        tokens = [end for _, _, end in spans]
        case = sealed_case(kv_format, tokens, kv_heads=kv_heads, dim=DIM, page=64, rank=rank)
        case.fill(tokens)
        cache, batch = case.cache, case.batch(spans)
        exact, name = cache, "sealed_attention_prefill"
    rng = np.random.default_rng(3)
    q = torch.from_numpy(rng.normal(size=(len(batch.positions), heads, DIM))).float()
    sinks = torch.from_numpy(rng.normal(size=heads)).float()
    expected = TWINS[name](q.double(), exact, batch, DIM**-0.5, window, sinks.double())
    args = (q.to(DEVICE), *moved((cache, batch), DEVICE), DIM**-0.5, window, sinks.to(DEVICE))
    if torch.cuda.get_device_capability() == (9, 0):
        assert takes(args[0], args[2], kv_heads, 32 if kv_format == "bf16" else 64)
    found = getattr(OPS, name)(*args)
    error = (found.cpu().double() - expected).abs().amax(-1)
    limit = OPS.chosen[name].tolerance * expected.abs().amax(-1)
    assert bool((error <= limit).all()), float((error / limit).max())
    assert torch.equal(getattr(OPS, name)(*args), found)
