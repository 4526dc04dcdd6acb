"""C++ over sealed pages: the reference's codes, its attention in float64, and the same bits always."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.ops.cpu.control import available
from headrace.ops.reference import attention_lowbit as reference
from headrace.ops.reference.sealing import pages_of
from tests.fixtures.sealed import SealedPool, keys_and_values

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

if available() is None:
    from headrace.ops.cpu import _native, sealed
    from headrace.ops.cpu.control import set_num_threads
    from headrace.ops.cpu.table import SUM_TOLERANCE

CASES = [
    # format, rank, head, page, window
    ("fp8", 0, 64, 64, None),
    ("nvfp4k-fp8v", 0, 64, 64, None),
    ("nvfp4k-fp8v", 4, 64, 32, None),
    ("nvfp4k-fp8v", 4, 128, 128, 50),
    ("nvfp4k-fp8v", 4, 16, 16, 7),
    ("nvfp4k-fp8v", 4, 80, 64, 100),
    ("nvfp4k-fp8v", 2, 256, 64, None),
    ("fp8", 0, 48, 32, 33),
]
ISAS = _native.supported_isas() if available() is None else []


@pytest.fixture(params=[i for i in ISAS if i != "avx512_vnni"])
def isa(request):
    before = _native.isa()
    _native.select_isa(request.param)
    yield request.param
    _native.select_isa(before)


def pools(case, tokens):
    kv_format, rank, dim, page, _ = case
    made = [
        SealedPool(kv_format, head_dim=dim, block_tokens=page, rank=rank, num_blocks=40)
        for _ in range(2)
    ]
    return made, [p.blocks(tokens) for p in made]


@pytest.mark.parametrize("case", CASES)
def test_codes_are_the_references(case):
    tokens = 300
    (ours, theirs), (blocks, same) = pools(case, tokens)
    assert blocks == same
    k, v = keys_and_values(tokens, 2, case[2], seed=2)
    k[40:80] *= 1e-4
    k[100:130] *= 300.0
    start = 0
    for count in (100, 1, 99, 100):
        part = slice(start, start + count)
        sealed.sealed_append(k[part], v[part], ours.cache, ours.batch([(blocks, start, count)]))
        reference.sealed_append(
            k[part], v[part], theirs.cache, theirs.batch([(same, start, count)])
        )
        start += count
    full = torch.tensor(blocks[: tokens // case[3]])
    for got, want in zip(
        vars(pages_of(ours.cache, full)).values(),
        vars(pages_of(theirs.cache, full)).values(),
        strict=True,
    ):
        assert (got is None) == (want is None)
        if got is not None:
            assert torch.equal(got, want)
    if ours.cache.first_keys is not None:
        assert torch.equal(ours.cache.first_keys[blocks[0]], theirs.cache.first_keys[blocks[0]])


def test_every_code_of_e4m3_rounds_as_torch_does():
    """Through the values of a page whose scale is 1: its largest is 448."""
    x = torch.cat((torch.arange(0, 0x4400, 7, dtype=torch.int32), torch.arange(0x3A00, 0x43E0)))
    floats = (x.to(torch.int32) << 16).view(torch.float32)
    floats = floats[floats <= 448]
    rows = -(-floats.numel() // 32)
    values = torch.zeros(rows * 32)
    values[: floats.numel()] = floats
    pages = -(-rows // 32)
    v = torch.zeros(pages * 32, 2, 32)
    v[:rows, 0], v[:rows, 1] = values.view(rows, 32), -values.view(rows, 32)
    v[::32, :, 0] = 448.0
    pool = SealedPool("fp8", num_blocks=pages + 8, batch_tokens=pages * 32)
    blocks = pool.blocks(pages * 32)
    batch = pool.batch([(blocks, 0, pages * 32)])
    sealed.sealed_append(torch.zeros_like(v), v, pool.cache, batch)
    found = pool.cache.value_codes[torch.tensor(blocks)].permute(0, 3, 1, 2).flatten(0, 1)
    assert bool((pool.cache.page_scales[torch.tensor(blocks), :, 1] == 1).all())
    assert torch.equal(found, v.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("isa")
def test_attention_is_within_tolerance_of_float64(case):
    tokens, window, dim = 300, case[4], case[2]
    (pool, _), (blocks, _) = pools(case, tokens)
    k, v = keys_and_values(tokens, 2, dim, seed=5)
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(tokens, 6, dim, generator=generator)
    sinks = torch.randn(6, generator=generator)
    start = 0
    for count in (130, 1, 1, 1, 60, 107):
        part = slice(start, start + count)
        batch = pool.batch([(blocks, start, count)])
        sealed.sealed_append(k[part], v[part], pool.cache, batch)
        got = sealed.sealed_attention(q[part], pool.cache, batch, dim**-0.5, window, sinks)
        want = reference.sealed_attention(
            q[part].double(), pool.cache, batch, dim**-0.5, window, sinks.double()
        )
        worst = float((got.double() - want).abs().max() / want.abs().max())
        assert worst <= SUM_TOLERANCE
        start += count


@pytest.mark.parametrize("case", CASES[:5])
def test_a_row_has_the_same_bits_alone_in_chunks_and_beside_others(case):
    tokens, window, dim = 150, case[4], case[2]
    k, v = keys_and_values(tokens, 2, dim, seed=7)
    other_k, other_v = keys_and_values(90, 2, dim, seed=8)
    q = torch.randn(tokens, 4, dim, generator=torch.Generator().manual_seed(9))
    other_q = torch.randn(90, 4, dim, generator=torch.Generator().manual_seed(10))
    results = []
    for cuts, threads in (([tokens], 2), ([1] * tokens, 1), ([37, 64, 1, 48], 2)):
        set_num_threads(threads)
        (pool, _), (blocks, _) = pools(case, tokens)
        beside = pool.blocks(90)
        start, other, rows = 0, 0, []
        for count in cuts:
            part = slice(start, start + count)
            more = min(11, 90 - other)
            work = [(blocks, start, count)] + ([(beside, other, more)] if more else [])
            batch = pool.batch(work)
            extra = slice(other, other + more)
            sealed.sealed_append(
                torch.cat((k[part], other_k[extra])),
                torch.cat((v[part], other_v[extra])),
                pool.cache,
                batch,
            )
            both = torch.cat((q[part], other_q[extra]))
            rows.append(sealed.sealed_attention(both, pool.cache, batch, 0.1, window)[:count])
            start, other = start + count, other + more
        results.append(torch.cat(rows))
    set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_is_out_of_range_is_refused():
    pool = SealedPool("nvfp4k-fp8v")
    blocks = pool.blocks(40)
    k, v = keys_and_values(40, 2, 32)
    batch = pool.batch([(blocks, 0, 40)])
    sealed.sealed_append(k, v, pool.cache, batch)
    q = torch.zeros(40, 4, 32)
    batch.block_tables[0, 0] = 99
    with pytest.raises(InternalError, match="positions"):
        sealed.sealed_attention(q, pool.cache, batch, 1.0)
    bad = pool.batch([(pool.blocks(40), 0, 40)])
    assert bad.open is not None
    bad.open.seals[0, 0] = np.iinfo(np.int32).max
    with pytest.raises(InternalError, match="seals"):
        sealed.sealed_append(k, v, pool.cache, bad)
    bad.open.rows[3] = -1
    with pytest.raises(InternalError, match="open rows"):
        sealed.sealed_append(k, v, pool.cache, bad)
