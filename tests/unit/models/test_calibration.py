"""Moments of queries over the whole context: turning the moments equals moving the queries."""

import pytest
import torch

from headrace.core.model_spec import RopeSpec
from headrace.layers.rope import build_rope_table
from headrace.models.calibration import over_context
from headrace.ops.reference.attention import rope


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 12])
def test_moments_over_the_context_are_those_of_queries_moved_there(
    interleaved: bool, rotated: int
) -> None:
    """Oracle: the reference operation turns the queries themselves, at every place of the text."""
    spec = RopeSpec(theta=100.0, dim=rotated, scaling="yarn", factor=4.0, original_context=32)
    table = build_rope_table(spec, 70, interleaved=interleaved)
    text = 7  # of 70 positions: it fits at 64 places, 0 to 63
    q = torch.randn(text, 2, 12)
    positions = torch.arange(text)
    factor = table.cos[0, 0].double()
    expected = torch.zeros(2, 12, 12, dtype=torch.float64)
    for offset in range(64):
        moved = rope(q.clone(), table, positions + offset).double()
        expected += torch.einsum("thi,thj->hij", moved, moved) / 64
    here = rope(q.clone(), table, positions).double()
    moments = torch.einsum("thi,thj->hij", here, here)
    assert factor > 1.0  # YaRN's factor must not be applied twice
    torch.testing.assert_close(over_context(moments, table, text), expected, rtol=1e-5, atol=1e-5)


def test_a_text_as_long_as_the_context_stays_where_it_is() -> None:
    table = build_rope_table(RopeSpec(theta=100.0, dim=8), 16)
    moments = torch.randn(1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(over_context(moments, table, 16), moments)
