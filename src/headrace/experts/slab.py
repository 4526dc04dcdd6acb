"""Where the bytes of an expert lie: one slab for each (layer, expert), cut into slices.

A *slice* is a range of the intermediate dimension with everything that it needs: its rows of gate and
up, the matching columns of down, their scales and biases. It can be fetched, cached and computed
alone, and an expert's output is the sum of its slices' outputs. Host RAM, GPU slots and both kernels
use this one layout, so a fetch is one copy of ``slice_nbytes``.

Within a slice, in this order, each part at a multiple of ``PART_ALIGNMENT`` bytes:

- ``gate_up``: 2 * width rows of ``hidden`` weights, row 2i gate i and row 2i + 1 up i
- ``gate_up_scales``: as many rows of scales, for formats that keep scales apart
- ``down``: ``hidden`` rows of ``width`` weights
- ``down_scales``
- ``gate_up_bias``: float32 [2 * width], in the order of the rows
- ``down_bias``: float32 [hidden]; zero in all slices but the first, so that every slice adds it

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.numeric import FORMATS

PART_ALIGNMENT = 64  # a cache line, and what wide loads on both sides like best
SLICE_ALIGNMENT = 4096  # a page: slices can be pinned, mapped from a file and copied alone
# Slices for an expert, if its dimensions allow: finer steps of the split against more bookkeeping.
PREFERRED_SLICES = 4

# Formats whose scales are a part of their own: weights that share one byte of scale.
_SCALES_APART = {"mxfp4": 32, "nvfp4": 16}
_CODES_NBYTES = {"mxfp4": (2, 1), "nvfp4": (2, 1)}  # weights, bytes


@dataclass(frozen=True)
class SlabPart:
    """One part of a slice: ``rows`` rows of ``row_nbytes`` bytes, ``offset`` bytes from its start."""

    name: str
    offset: int
    rows: int
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes


@dataclass(frozen=True)
class SlabLayout:
    """The layout of every slab of a model. Make it with ``slab_layout``."""

    format: str  # key of core.numeric.FORMATS
    hidden: int
    intermediate: int
    num_slices: int
    has_bias: bool
    parts: tuple[SlabPart, ...]
    slice_nbytes: int

    @property
    def width(self) -> int:
        """Intermediate columns of one slice."""
        return self.intermediate // self.num_slices

    @property
    def slab_nbytes(self) -> int:
        """Bytes of a whole expert."""
        return self.num_slices * self.slice_nbytes

    def part(self, name: str) -> SlabPart:
        """The part of this name; KeyError if the layout has none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)


def slab_layout(
    fmt: str, hidden: int, intermediate: int, *, has_bias: bool, num_slices: int | None = None
) -> SlabLayout:
    """Lay out the slices of an expert [intermediate, hidden] stored in ``fmt``.

    Args:
        num_slices: of one expert; the admissible count nearest to ``PREFERRED_SLICES`` if None.

    Raises:
        ConfigError: the dimensions are not whole blocks of the format, or the slices are not.
    """
    block = FORMATS[fmt].block_weights
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % block:
            raise ConfigError(
                f"experts in {fmt}: {name} is {size}, expected a multiple of {block}",
                hint="blocks cannot be cut; convert the experts to another format",
            )
    if num_slices is None:
        num_slices = _nearest_count(intermediate // block)
    elif num_slices < 1 or intermediate // block % num_slices:
        raise ConfigError(
            f"experts in {fmt}: {num_slices} slices of {intermediate} columns, expected a count that "
            f"divides {intermediate // block} (blocks of {block})",
            hint="leave the number of slices out to have it chosen",
        )
    width = intermediate // num_slices
    parts: list[SlabPart] = []
    end = 0

    def add(name: str, rows: int, row_nbytes: int) -> None:
        nonlocal end
        parts.append(SlabPart(name, end, rows, row_nbytes))
        end = _up(end + rows * row_nbytes, PART_ALIGNMENT)

    for name, rows, cols in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        add(name, rows, _codes_nbytes(fmt, cols))
        if fmt in _SCALES_APART:
            add(f"{name}_scales", rows, cols // _SCALES_APART[fmt])
    if has_bias:
        add("gate_up_bias", 1, 4 * 2 * width)
        add("down_bias", 1, 4 * hidden)
    return SlabLayout(
        fmt, hidden, intermediate, num_slices, has_bias, tuple(parts), _up(end, SLICE_ALIGNMENT)
    )


def _codes_nbytes(fmt: str, cols: int) -> int:
    if fmt in _CODES_NBYTES:
        weights, nbytes = _CODES_NBYTES[fmt]
        return cols // weights * nbytes
    return FORMATS[fmt].row_nbytes(cols)


def _nearest_count(blocks: int) -> int:
    """The divisor of ``blocks`` nearest to the preferred count; the smaller of two equally near."""
    divisors = (n for n in range(1, blocks + 1) if blocks % n == 0)
    return min(divisors, key=lambda n: (abs(n - PREFERRED_SLICES), n))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
