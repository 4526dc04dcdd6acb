"""The layout of slabs, against sums made by hand."""

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.slab import slab_layout


def test_gpt_oss_expert_by_hand():
    # 2880 x 2880 in MXFP4: 90 blocks of 32, of which 5 slices have 18 each
    layout = slab_layout("mxfp4", 2880, 2880, has_bias=True)
    assert (layout.num_slices, layout.width) == (5, 576)
    codes = 2 * 576 * 1440 + 2880 * 288
    scales = 2 * 576 * 90 + 2880 * 18
    biases = 2 * 576 * 4 + 2880 * 4
    # every part's size is a multiple of 64 here, so nothing but the page is rounded up
    assert sum(p.nbytes for p in layout.parts) == codes + scales + biases == 2_659_968
    assert layout.slice_nbytes == 650 * 4096  # 649.4 pages
    assert layout.part("down").offset == 2 * 576 * 1440 + 2 * 576 * 90
    assert layout.slab_nbytes == 5 * 650 * 4096


@pytest.mark.parametrize(
    ("intermediate", "slices"),
    [(768, 4), (2048, 4), (1536, 4), (2880, 5), (1440, 5), (96, 3), (224, 7), (32 * 11, 1)],
)
def test_the_admissible_count_nearest_to_five(intermediate: int, slices: int):
    # blocks of 32: 24 (4 and 6 are as near, the smaller), 64 (4 before 8), 48 (4 and 6), 90, 45, 3, 7, 11
    assert slab_layout("mxfp4", 64, intermediate, has_bias=False).num_slices == slices


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
