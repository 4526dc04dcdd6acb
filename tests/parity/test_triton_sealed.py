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


HEADS = [(4, 2), (5, 1), (2, 2)]


@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@pytest.mark.parametrize(("dim", "page", "window"), [(64, 16, None), (32, 32, 20), (48, 16, 70)])
def test_decode_over_sealed_pages(kv_format, rank, dim, page, window):
    """First tokens, own pages of one row and of all, windows within a page and over several."""
    tokens = [1, page, page + 1, 5 * page + 3, 18, 4 * page]
    for seed, (heads, kv_heads) in enumerate(HEADS):
        case = sealed_case(
            kv_format, tokens, kv_heads=kv_heads, dim=dim, page=page, rank=rank, seed=seed
        )
        case.fill(tokens)
        rng = np.random.default_rng(seed)
        q = torch.from_numpy(rng.normal(size=(len(tokens), heads, dim)).astype(np.float32))
        spans = [(s, n - 1, n) for s, n in enumerate(tokens)]
        cache, batch = moved((case.cache, case.batch(spans)), DEVICE)
        for sinks in (None, torch.from_numpy(rng.normal(size=heads).astype(np.float32))):
            args = (q.to(DEVICE), cache, batch, dim**-0.5, window, moved(sinks, DEVICE))
            found = OPS.sealed_attention_decode(*args)
            expected = expected_rows(case, q, spans, dim, window, sinks)
            close("sealed_attention_decode", found, expected)


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
