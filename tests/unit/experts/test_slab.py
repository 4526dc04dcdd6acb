"""The layout of slabs, against sums made by hand."""

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.slab import slab_layout


def test_gpt_oss_expert_by_hand():
    # 2880 x 2880 in MXFP4: 90 blocks of 32, nearest divisor to 4 is 3 (5 is as near; the smaller)
    layout = slab_layout("mxfp4", 2880, 2880, has_bias=True)
    assert (layout.num_slices, layout.width) == (3, 960)
    codes = 2 * 960 * 1440 + 2880 * 480
    scales = 2 * 960 * 90 + 2880 * 30
    biases = 2 * 960 * 4 + 2880 * 4
    assert sum(p.nbytes for p in layout.parts) == codes + scales + biases
    # every part's size is a multiple of 64 here, so nothing but the page is rounded up
    assert layout.slice_nbytes == -(-(codes + scales + biases) // 4096) * 4096
    assert layout.part("down").offset == 2 * 960 * 1440 + 2 * 960 * 90
    assert layout.slab_nbytes == 3 * layout.slice_nbytes


def test_block_formats_keep_blocks_whole():
    layout = slab_layout("q4_k", 2048, 768, has_bias=False)  # 3 blocks of 256: 3 slices
    assert layout.num_slices == 3
    assert layout.part("gate_up").row_nbytes == 2048 // 256 * 144
    assert layout.part("down").row_nbytes == 144
    assert [p.name for p in layout.parts] == ["gate_up", "down"]


@pytest.mark.parametrize(("hidden", "intermediate"), [(48, 64), (64, 48)])
def test_cut_blocks_are_refused(hidden, intermediate):
    with pytest.raises(ConfigError, match="multiple of 32"):
        slab_layout("mxfp4", hidden, intermediate, has_bias=False)


def test_slices_that_cut_blocks_are_refused():
    with pytest.raises(ConfigError, match="4 slices of 96 columns"):
        slab_layout("mxfp4", 64, 96, has_bias=False, num_slices=4)


def test_parts_are_aligned():
    layout = slab_layout("mxfp4", 96, 96, has_bias=True, num_slices=1)
    assert all(part.offset % 64 == 0 for part in layout.parts)
    assert layout.slice_nbytes % 4096 == 0
