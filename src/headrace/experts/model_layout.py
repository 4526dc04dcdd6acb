"""The slabs of a model whose layers, or whose matrices, are stored in different formats.

GGUF files mix block types: a Q4_K_M file has Q4_K for gate and up, and Q6_K for down in some layers and
Q4_K in others. Every layer has a layout of its own; all are cut into equally many slices, since a slot
may hold a slice of any layer. So slots are as long as the longest slice.

What that wastes, against slots by class: in a Q4_K_M file of 2048 x 768 experts half of the layers have
slices of 0.88 MB and half of 1.02 MB, so a slot that holds a short one leaves 13% of its bytes empty,
6.6% on average. Classes of slots would leave none, but a layer's hot experts could then only displace
those of its own class, and the classes' shares would have to be chosen before the routing is known.
Host memory and PCIe carry the layer's own bytes, padding to a page apart. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from headrace.experts.slab import SlabLayout, num_units, preferred_slices, slab_layout


@dataclass(frozen=True)
class ExpertKind:
    """How the experts of one layer are stored.

    gate_up, down: formats, keys of core.numeric.FORMATS; block_factors: fp8 with a factor for each 128 x
    128 weights
    """

    gate_up: str
    down: str
    block_factors: bool = False


def model_layouts(
    kinds: Sequence[ExpertKind],
    hidden: int,
    intermediate: int,
    *,
    has_bias: bool,
    num_slices: int | None = None,
) -> tuple[SlabLayout, ...]:
    """The layout of every layer; equal kinds share one object.

    Args:
        kinds: of each layer of experts, at least one.
        num_slices: of one expert; the count nearest to the preferred one that all kinds allow if None.

    Raises:
        ConfigError: the dimensions are not whole blocks of a format, or the slices are not.
    """
    if num_slices is None:
        units = (num_units(intermediate, k.gate_up, k.down, k.block_factors) for k in set(kinds))
        num_slices = preferred_slices(max(1, gcd(*units)))  # 0: too short for a block
    made = {
        k: slab_layout(
            k.gate_up,
            hidden,
            intermediate,
            has_bias=has_bias,
            num_slices=num_slices,
            down_format=k.down,
            block_factors=k.block_factors,
        )
        for k in set(kinds)
    }
    return tuple(made[k] for k in kinds)


def widest(layouts: Sequence[SlabLayout]) -> SlabLayout:
    """The layout with the longest slices: what a slot must hold."""
    return max(layouts, key=lambda layout: layout.slice_nbytes)


def mean_slice_nbytes(layouts: Sequence[SlabLayout]) -> int:
    """Bytes of a slice, over all layers: for rates and statistics that do not tell layers apart."""
    return round(sum(layout.slice_nbytes for layout in layouts) / len(layouts))
