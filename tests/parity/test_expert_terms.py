"""Integer products of GGUF blocks against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.experts.slab_pack import row_planes
from tests.fixtures.cpu_oracle import random_packed, values_of
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton
# Two int8 terms hold 15 bits of a block's largest activation.
TOLERANCE = 5e-5


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k", "q8_0", "q4_0"])
def test_rows_times_terms_are_the_float64_product(name: str) -> None:
    from headrace.ops.triton.expert_terms import term_words, terms_of_rows
    from tests.fixtures.terms_kernel import terms_matvec

    rows, cols = 21, 576 if name == "q8_0" else 512  # Q8_0 may end in half a step
    rng = np.random.default_rng(8)
    w = random_packed(name, rows, cols, rng)
    x = torch.from_numpy(rng.normal(size=(2, cols)).astype(np.float32))
    x[1, 32:64] = 0.0  # a block without a unit
    terms = torch.zeros(2, term_words(cols), dtype=torch.int32, device=DEVICE)
    terms_of_rows[(2, 3)](x.to(DEVICE), terms, cols, 8)
    planes = {k: torch.from_numpy(v.copy()).to(DEVICE) for k, v in row_planes(w).items()}
    codes, scales = planes[""], planes.get("_scales", planes[""])
    for token in range(2):
        out = torch.zeros(rows, device=DEVICE)
        terms_matvec[(2,)](
            codes,
            scales,
            terms[token],
            out,
            rows,
            codes.stride(0),
            scales.stride(0),
            name,
            cols,
            16,
        )
        want = values_of(w).astype(np.float64) @ x[token].double().numpy()
        assert np.abs(out.cpu().numpy() - want).max() / np.abs(want).max() < TOLERANCE
