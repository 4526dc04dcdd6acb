"""Triton kernels over sealed pages beside the reference: bytes equal, attention within tolerance."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from headrace.ops import reference
from headrace.ops.registry import resolve
from tests.fixtures.kernel_cases import moved
from tests.fixtures.sealed_cases import SealedCase, sealed_case
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
TWINS = {op.name: op.function for op in reference.OPS}
FORMATS = [("fp8", 0), ("nvfp4k-fp8v", 0), ("nvfp4k-fp8v", 4)]


def same_bytes(found: SealedCase, expected: SealedCase) -> None:
    for part in fields(expected.cache):
        a, b = getattr(found.cache, part.name), getattr(expected.cache, part.name)
        if isinstance(b, torch.Tensor):
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[b.element_size()]
            assert torch.equal(a.cpu().view(bits), b.view(bits)), part.name


@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@pytest.mark.parametrize(("dim", "page"), [(32, 16), (64, 32), (48, 64)])
def test_pages_are_sealed_with_the_bytes_of_the_reference(kv_format, rank, dim, page):
    """Whatever the chunks: one row, parts of pages, whole pages; several sequences at once."""
    tokens = [2 * page + 5, page, 3]
    expected = sealed_case(kv_format, tokens, dim=dim, page=page, rank=rank, seed=dim)
    found = expected.copy()
    found.cache = moved(found.cache, DEVICE)
    steps = [
        [(0, 0, 5), (1, 0, page - 1), (2, 0, 1)],
        [(0, 5, 2 * page - 1), (1, page - 1, page), (2, 1, 2)],
        [(0, 2 * page - 1, 2 * page), (2, 2, 3)],
        [(0, 2 * page, 2 * page + 5)],
    ]
    for spans in steps:
        k, v = expected.rows(spans)
        TWINS["sealed_append"](k, v, expected.cache, expected.batch(spans))
        OPS.sealed_append(*moved((k, v), DEVICE), found.cache, moved(found.batch(spans), DEVICE))
    same_bytes(found, expected)


def expected_rows(case: SealedCase, q, spans, dim, window, sinks) -> torch.Tensor:
    """The float64 reference, which sees the pages as they are stored."""
    wide = None if sinks is None else sinks.double()
    twin = TWINS["sealed_attention_decode"]
    return twin(q.double(), case.cache, case.batch(spans), dim**-0.5, window, wide)


def close(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Row by row, so that none hides behind a larger one."""
    error = (found.cpu().double() - expected).abs().amax(-1)
    limit = OPS.chosen[name].tolerance * expected.abs().amax(-1)
    assert bool((error <= limit).all()), float((error / limit).max())


DECODING = [
    # (heads, key heads), (head dim, page), window
    ((4, 2), (64, 16), None),
    ((5, 1), (32, 32), 20),
    ((2, 2), (48, 16), 70),
]


@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@pytest.mark.parametrize(("heads", "shape", "window"), DECODING)
def test_decode_over_sealed_pages(kv_format, rank, heads, shape, window):
    """First tokens, own pages of one row and of all, windows within a page and over several."""
    (num_heads, kv_heads), (dim, page) = heads, shape
    tokens = [1, page + 1, 5 * page + 3, 18, 4 * page]
    case = sealed_case(kv_format, tokens, kv_heads=kv_heads, dim=dim, page=page, rank=rank)
    case.fill(tokens)
    rng = np.random.default_rng(dim)
    q = torch.from_numpy(rng.normal(size=(len(tokens), num_heads, dim)).astype(np.float32))
    sinks = torch.from_numpy(rng.normal(size=num_heads).astype(np.float32)) if rank else None
    spans = [(s, n - 1, n) for s, n in enumerate(tokens)]
    cache, batch = moved((case.cache, case.batch(spans)), DEVICE)
    args = (q.to(DEVICE), cache, batch, dim**-0.5, window, moved(sinks, DEVICE))
    found = OPS.sealed_attention_decode(*args)
    close("sealed_attention_decode", found, expected_rows(case, q, spans, dim, window, sinks))
    alone = case.batch(spans[2:3])
    args = (q[2:3].to(DEVICE), cache, moved(alone, DEVICE), *args[3:])
    assert torch.equal(OPS.sealed_attention_decode(*args)[0], found[2])  # whoever else is there


@pytest.mark.parametrize(("kv_format", "rank"), [("fp8", 0), ("nvfp4k-fp8v", 4)])
def test_decode_of_many_parts_merges_them(kv_format, rank):
    """More pages than parts can take one each, and parts that start after the first page."""
    tokens = [70 * 16 + 5, 33 * 16]
    case = sealed_case(kv_format, tokens, kv_heads=1, dim=32, page=16, rank=rank)
    case.fill(tokens)
    q = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(0))
    spans = [(s, n - 1, n) for s, n in enumerate(tokens)]
    for window in (None, 700):
        cache, batch = moved((case.cache, case.batch(spans)), DEVICE)
        found = OPS.sealed_attention_decode(q.to(DEVICE), cache, batch, 32**-0.5, window, None)
        close("sealed_attention_decode", found, expected_rows(case, q, spans, 32, window, None))


@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@pytest.mark.parametrize(("dim", "page", "window"), [(32, 16, None), (64, 32, 20), (48, 64, 70)])
def test_prefill_over_sealed_pages(kv_format, rank, dim, page, window):
    """Whole prompts, chunks that start and end within pages, one row beside many."""
    spans = [(0, 0, 2 * page + 9), (1, page - 2, 2 * page + 3), (2, 0, 1), (3, 75, 76)]
    tokens = [end for _, _, end in spans]
    case = sealed_case(kv_format, tokens, dim=dim, page=page, rank=rank, seed=dim)
    case.fill(tokens)
    rng = np.random.default_rng(dim)
    batch = case.batch(spans)
    q = torch.from_numpy(rng.normal(size=(len(batch.positions), 4, dim)).astype(np.float32))
    sinks = torch.from_numpy(rng.normal(size=4).astype(np.float32)) if rank else None
    cache, there = moved((case.cache, batch), DEVICE)
    args = (q.to(DEVICE), cache, there, dim**-0.5, window, moved(sinks, DEVICE))
    found = OPS.sealed_attention_prefill(*args)
    close("sealed_attention_prefill", found, expected_rows(case, q, spans, dim, window, sinks))
    assert torch.equal(OPS.sealed_attention_prefill(*args), found)


needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
REAL = [((32, 8), (128, 64)), ((64, 8), (64, 64)), ((4, 1), (256, 64)), ((9, 3), (64, 128))]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@pytest.mark.parametrize(("heads", "shape"), REAL)
@pytest.mark.parametrize("window", [None, 512])
def test_sealed_attention_at_real_sizes(kv_format, rank, heads, shape, window, monkeypatch):
    """Decoding by the kernel in CUDA C++ where there is one, and by Triton's, too."""
    from headrace.ops.triton import sealed_decode_cuda

    (num_heads, kv_heads), (dim, page) = heads, shape
    spans = [(0, 4600, 5000), (1, 0, 1023), (2, 16, 17), (3, 2047, 2048)]
    tokens = [end for _, _, end in spans]
    case = sealed_case(kv_format, tokens, kv_heads=kv_heads, dim=dim, page=page, rank=rank)
    found = case.copy()
    found.cache = moved(found.cache, DEVICE)
    whole = [(s, 0, n) for s, n in enumerate(tokens)]
    case.fill(tokens)
    OPS.sealed_append(
        *moved(case.rows(whole), DEVICE), found.cache, moved(case.batch(whole), DEVICE)
    )
    same_bytes(found, case)
    rng = np.random.default_rng(14)
    for name, rows in (
        ("sealed_attention_prefill", spans),
        ("sealed_attention_decode", [(s, n - 1, n) for s, n in enumerate(tokens)]),
    ):
        batch = case.batch(rows)
        q = torch.from_numpy(rng.normal(size=(len(batch.positions), num_heads, dim))).float()
        sinks = torch.from_numpy(rng.normal(size=num_heads)).float()
        args = (
            q.to(DEVICE),
            found.cache,
            moved(batch, DEVICE),
            dim**-0.5,
            window,
            sinks.to(DEVICE),
        )
        out, expected = getattr(OPS, name)(*args), expected_rows(case, q, rows, dim, window, sinks)
        close(name, out, expected)
        assert torch.equal(getattr(OPS, name)(*args), out)
    monkeypatch.setattr(sealed_decode_cuda, "takes", lambda q, cache: False)
    close(name, getattr(OPS, name)(*args), expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("change", [{"tau": 8}, {"polynomial": 1}, {"tau": 8, "polynomial": 1}])
def test_tuned_softmax_is_within_tolerance(change, monkeypatch):
    """Lazy rescaling and the polynomial, whether the table has them on or not."""
    from dataclasses import replace

    from headrace.ops.triton import tuning

    key = (tuning.capability(DEVICE), "sealed")
    row = tuning.PREFILL.get(key, tuning.PREFILL[((0, 0), "sealed")])
    monkeypatch.setitem(tuning.PREFILL, key, replace(row, **change))
    case = sealed_case("nvfp4k-fp8v", [3000], kv_heads=2, dim=128, page=64, rank=4)
    case.fill([3000])
    spans = [(0, 2000, 3000)]
    q = 3 * torch.randn(1000, 8, 128, generator=torch.Generator().manual_seed(2))
    cache, batch = moved((case.cache, case.batch(spans)), DEVICE)
    found = OPS.sealed_attention_prefill(q.to(DEVICE), cache, batch, 128**-0.5, None, None)
    close("sealed_attention_prefill", found, expected_rows(case, q, spans, 128, None, None))
