"""Layers of experts in different formats: cut alike, each as long as its formats."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.model_layout import ExpertKind, mean_slice_nbytes, model_layouts, widest


def test_all_layers_have_slices_that_every_format_can_be_cut_into() -> None:
    """768 columns: 24 blocks of Q8_0, alone in 4 slices; 3 superblocks of Q4_K."""
    q8, mixed = ExpertKind("q8_0", "q8_0"), ExpertKind("q4_k", "q4_k")
    (alone,) = model_layouts([q8], 2048, 768, has_bias=False)
    assert alone.num_slices == 4
    layouts = model_layouts([q8, mixed, q8], 2048, 768, has_bias=False)
    assert [layout.num_slices for layout in layouts] == [3, 3, 3]
    assert layouts[0] is layouts[2]


def test_a_slot_holds_the_longest_slice() -> None:
    """Q4_K: 4.5 bits a weight, Q6_K 6.5625; 256 of 768 columns; 4 KiB pages, which these fill."""
    kinds = [ExpertKind("q4_k", "q6_k"), ExpertKind("q4_k", "q4_k")]
    layouts = model_layouts(kinds, 2048, 768, has_bias=False)
    weights = 2048 * 256
    nbytes = [int(weights * (9 + down) / 8) for down in (6.5625, 4.5)]
    assert [layout.slice_nbytes for layout in layouts] == nbytes
    assert widest(layouts) is layouts[0]
    assert mean_slice_nbytes(layouts) == sum(nbytes) // 2
    assert 1 - nbytes[1] / nbytes[0] == pytest.approx(0.133, abs=5e-4)  # of a slot, left empty


def test_a_format_whose_blocks_do_not_fit_is_named() -> None:
    kinds = [ExpertKind("q4_0", "q4_0"), ExpertKind("q4_k", "q4_k")]
    with pytest.raises(ConfigError, match="experts in q4_k: intermediate is 704"):
        model_layouts(kinds, 2048, 704, has_bias=False)
