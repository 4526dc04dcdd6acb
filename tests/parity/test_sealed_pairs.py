"""Every pair of head size and page that is accepted at start has kernels that run on this GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.kv_formats import MAX_HEAD_DIM
from headrace.engine.choosing import BLOCK_TOKENS
from headrace.ops import reference
from headrace.ops.registry import resolve
from tests.fixtures.kernel_cases import moved
from tests.fixtures.sealed_cases import sealed_case
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
TWINS = {op.name: op.function for op in reference.OPS}
# The largest tiles, and head sizes that are padded to a power of two.
PAIRS = [(MAX_HEAD_DIM, BLOCK_TOKENS[-1]), (MAX_HEAD_DIM, 16), (192, 128), (128, 128), (96, 128)]


@pytest.mark.parametrize(("kv_format", "rank"), [("nvfp4k-fp8v", 4), ("fp8", 0)])
@pytest.mark.parametrize(("dim", "page"), PAIRS)
def test_append_prefill_and_decode_run(kv_format: str, rank: int, dim: int, page: int):
    spans = [(0, 0, page + 9), (1, page, 2 * page)]
    tokens = [end for _, _, end in spans]
    case = sealed_case(kv_format, tokens, kv_heads=1, dim=dim, page=page, rank=rank)
    found = case.copy()
    found.cache = moved(found.cache, DEVICE)
    for step in ([(0, 0, page + 9), (1, 0, page)], [(1, page, 2 * page)]):
        rows = case.rows(step)
        TWINS["sealed_append"](*rows, case.cache, case.batch(step))
        OPS.sealed_append(*moved(rows, DEVICE), found.cache, moved(case.batch(step), DEVICE))
    rng = np.random.default_rng(dim)
    last = [(s, n - 1, n) for s, n in enumerate(tokens)]
    for name, rows in (("sealed_attention_prefill", spans), ("sealed_attention_decode", last)):
        batch = case.batch(rows)
        q = torch.from_numpy(rng.normal(size=(len(batch.positions), 4, dim))).float()
        args = (moved(batch, DEVICE), dim**-0.5, None, None)
        out = getattr(OPS, name)(q.to(DEVICE), found.cache, *args).cpu().double()
        twin = TWINS["sealed_attention_decode"]
        expected = twin(q.double(), case.cache, batch, dim**-0.5, None, None)
        error = (out - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(error.max()) < OPS.chosen[name].tolerance
