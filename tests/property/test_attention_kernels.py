"""Attention kernels on random shapes beside the float64 reference: interpreted on a CPU, compiled on a GPU.

Keys have outlier channels, rows of very different sizes and a sink; pasts are empty, of one token, or longer
than windows are, so that rows see nothing of some tiles; a step has sequences without rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops import reference
from headrace.ops.records import LayerKV
from headrace.ops.registry import resolve
from tests.fixtures.kernel_cases import moved, normal, paged_batch, paged_cache
from tests.fixtures.sealed_cases import sealed_case
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
TWINS = {op.name: op.function for op in reference.OPS}
PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16}
# Formats of the cache, with residual scalars a token.
FORMATS = [("f32", 0), ("bf16", 0), ("fp8", 0), ("nvfp4k-fp8v", 0), ("nvfp4k-fp8v", 4)]
# The interpreter takes a second for an example, a GPU's compiler for each new shape.
SETTINGS = settings(max_examples=3 if INTERPRETED else 12, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """contexts: of each sequence, the step's rows included; rows: of each in prefill, 0 for none."""

    contexts: list[int]
    rows: list[int]
    kv_heads: int
    group: int
    dim: int
    page: int
    window: int | None
    sinks: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contexts = draw(st.lists(st.integers(1, 120), min_size=1, max_size=3))
    rows = [draw(st.integers(0, context)) for context in contexts]
    rows[draw(st.integers(0, len(rows) - 1))] = contexts[0] if len(rows) == 1 else 1
    return Case(
        contexts, rows, draw(st.integers(1, 2)), draw(st.integers(1, 5)),
        draw(st.sampled_from((32, 48, 64))), draw(st.sampled_from((16, 32))),
        draw(st.none() | st.integers(1, 100)), draw(st.booleans()), draw(st.integers(0, 999)),
    )  # fmt: skip


def plain_rows(
    case: Case, q: torch.Tensor, cache: LayerKV, tables: torch.Tensor, spans: list[tuple[int, int, int]],
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """softmax(q K^T / sqrt(D)) V in float64, a sink as one more logit whose value is zero."""
    parts = []
    counts = [end - start for _, start, end in spans]
    for (sequence, start, end), rows in zip(spans, q.double().split(counts), strict=True):
        at = torch.arange(end)
        places = tables[sequence, at // case.page].long(), slice(None), at % case.page
        keys, values = (
            pages[places].double().repeat_interleave(case.group, 1)
            for pages in (cache.keys, cache.values)
        )
        distance = torch.arange(start, end)[:, None] - at
        seen = (distance >= 0) & (distance < (case.window or end))
        scores = torch.einsum("thd,lhd->htl", rows, keys) * case.dim**-0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat((scores, column), -1)
        parts.append(torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., :end], values))
    return torch.cat(parts)


def check(
    case: Case, kv_format: str, rank: int, op: str, spans: list[tuple[int, int, int]]
) -> None:
    """The kernel's rows are the reference's, and the same bits twice."""
    rng = np.random.default_rng(case.seed)
    heads, rows = case.kv_heads * case.group, sum(end - start for _, start, end in spans)
    q = normal(rng, rows, heads, case.dim)
    sinks = normal(rng, heads) if case.sinks else None
    shape = (case.kv_heads, case.dim, case.page)
    if kv_format in PLAIN:
        cache, tables = paged_cache(rng, case.contexts, shape, PLAIN[kv_format])
        cache.keys[..., :: case.dim // 4] += 3.0
        batch = paged_batch(tables, spans)
        expected = plain_rows(case, q, cache, tables, spans, sinks)
    else:
        op = f"sealed_{op}"
        made = sealed_case(
            kv_format, case.contexts, kv_heads=case.kv_heads, dim=case.dim, page=case.page, rank=rank,
            seed=case.seed,
        )  # fmt: skip
        made.fill(case.contexts)
        cache, batch = made.cache, made.batch(spans)
        wide = None if sinks is None else sinks.double()
        expected = TWINS[op](q.double(), cache, batch, case.dim**-0.5, case.window, wide)
    assert OPS.chosen[op].backend == "triton"
    there = moved((q, cache, batch), DEVICE)
    args = (*there, case.dim**-0.5, case.window, moved(sinks, DEVICE))
    found = getattr(OPS, op)(*args)
    error = (found.cpu().double() - expected).abs().amax(-1)
    limit = 2e-5 if kv_format == "f32" else OPS.chosen[op].tolerance
    assert bool((error <= limit * expected.abs().amax(-1)).all()), float(error.max())
    assert torch.equal(getattr(OPS, op)(*args), found)


@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@SETTINGS
@given(case=cases())
def test_decoding_is_the_reference_on_any_shape(kv_format: str, rank: int, case: Case):
    spans = [(s, n - 1, n) for s, n in enumerate(case.contexts)]
    check(case, kv_format, rank, "attention_decode", spans)


@pytest.mark.parametrize(("kv_format", "rank"), FORMATS)
@SETTINGS
@given(case=cases())
def test_prefill_is_the_reference_on_any_shape(kv_format: str, rank: int, case: Case):
    spans = [(s, n - r, n) for s, (n, r) in enumerate(zip(case.contexts, case.rows, strict=True))]
    check(case, kv_format, rank, "attention_prefill", spans)
