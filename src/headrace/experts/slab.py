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
- ``gate_up_factors``, ``down_factors``: float32 that multiply, for ``nvfp4`` and ``fp8_e4m3``. One of
  a matrix (gate's, then up's; down's), or for fp8 in blocks of 128 x 128 one row for each band of 128
  rows (of gate_up row 2b gate's band b, row 2b + 1 up's) with one factor for each 128 columns
- ``gate_up_bias``: float32 [2 * width], in the order of the rows
- ``down_bias``: float32 [hidden]; zero in all slices but the first, so that every slice adds it

Experts stored as ``mxfp4_gguf`` lie in slabs as ``mxfp4``: the same numbers, nibbles and scales in the
order that the kernels read. GGUF blocks whose length is not whole words of four bytes are cut in two,
codes and scales. Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.block_planes import SCALES_APART, kept_as
from headrace.core.errors import ConfigError
from headrace.core.numeric import FORMATS

PART_ALIGNMENT = 64  # a cache line, and what wide loads on both sides like best
SLICE_ALIGNMENT = 4096  # a page: slices can be pinned, mapped from a file and copied alone
# Slices for an expert, if its dimensions allow: finer steps of the split against more bookkeeping. With
# whole slices a layer's two paths end up to half a slice's time apart. Simulated for experts of 2880 x
# 2880 in MXFP4, links of 44 and CPUs of 63 GB/s and 24% hits, 5 slices take 7.1 ms a token, 3 take
# 7.5 (benchmarks/residency/slices.py).
PREFERRED_SLICES = 5

# Formats with float32 factors beside their codes, and the rows and columns that share one, if in blocks.
_FACTORS = ("nvfp4", "fp8_e4m3")
FACTOR_BLOCK = 128


def slab_format(fmt: str) -> str:
    """The format in which slabs hold experts that a checkpoint stores in ``fmt``."""
    return kept_as(fmt)


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

    format: str  # of gate and up, key of core.numeric.FORMATS
    down_format: str
    block_factors: bool  # fp8 with a factor for each 128 x 128
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
    fmt: str,
    hidden: int,
    intermediate: int,
    *,
    has_bias: bool,
    num_slices: int | None = None,
    down_format: str | None = None,
    block_factors: bool = False,
) -> SlabLayout:
    """Lay out the slices of an expert [intermediate, hidden] stored in ``fmt``.

    Args:
        num_slices: of one expert; the admissible count nearest to ``PREFERRED_SLICES`` if None.
        down_format: of the down matrix where it differs (GGUF files mix block types).
        block_factors: fp8 with one factor for each 128 x 128 weights instead of one a matrix.

    Raises:
        ConfigError: the dimensions are not whole blocks of the format, or the slices are not.
    """
    fmt, down = slab_format(fmt), slab_format(down_format or fmt)
    for name, size, of in (("hidden", hidden, fmt), ("intermediate", intermediate, down)):
        block = FORMATS[of].block_weights
        if size % block:
            raise ConfigError(
                f"experts in {of}: {name} is {size}, expected a multiple of {block}",
                hint="blocks cannot be cut; convert the experts to another format",
            )
    block_factors = block_factors and "fp8_e4m3" in (fmt, down)
    units = num_units(intermediate, fmt, down, block_factors)
    if num_slices is None:
        num_slices = preferred_slices(units)
    elif num_slices < 1 or units % num_slices:
        raise ConfigError(
            f"experts in {down}: {num_slices} slices of {intermediate} columns, expected a count that "
            f"divides {units} (blocks of {intermediate // units})",
            hint="leave the number of slices out to have it chosen",
        )
    width = intermediate // num_slices
    parts = _Parts()
    for name, rows, cols, of in (
        ("gate_up", 2 * width, hidden, fmt),
        ("down", hidden, width, down),
    ):
        parts.add(name, rows, _codes_nbytes(of, cols))
        if of in SCALES_APART:
            weights, _, nbytes = SCALES_APART[of]
            parts.add(f"{name}_scales", rows, cols // weights * nbytes)
    for name, of in (("gate_up", fmt), ("down", down)):
        if of in _FACTORS:
            blocked = block_factors and of == "fp8_e4m3"
            parts.add(f"{name}_factors", *_factors(name, hidden, width, blocked))
    if has_bias:
        parts.add("gate_up_bias", 1, 4 * 2 * width)
        parts.add("down_bias", 1, 4 * hidden)
    return SlabLayout(
        format=fmt,
        down_format=down,
        block_factors=block_factors,
        hidden=hidden,
        intermediate=intermediate,
        num_slices=num_slices,
        has_bias=has_bias,
        parts=tuple(parts.found),
        slice_nbytes=round_up(parts.end, SLICE_ALIGNMENT),
    )


class _Parts:
    """Places one part after another."""

    def __init__(self) -> None:
        self.found: list[SlabPart] = []
        self.end = 0

    def add(self, name: str, rows: int, row_nbytes: int) -> None:
        self.found.append(SlabPart(name, self.end, rows, row_nbytes))
        self.end = round_up(self.end + rows * row_nbytes, PART_ALIGNMENT)


def num_units(intermediate: int, fmt: str, down: str, block_factors: bool) -> int:
    """Pieces that a slice may not cut, along the intermediate dimension.

    fmt, down: formats of gate/up and of down, whose blocks lie along that dimension.
    """
    if not (block_factors and "fp8_e4m3" in (fmt, down)):
        return intermediate // FORMATS[slab_format(down)].block_weights
    if intermediate % FACTOR_BLOCK:  # the last block is cut short: nothing else may be
        return 1
    return intermediate // FACTOR_BLOCK


def _factors(name: str, hidden: int, width: int, blocked: bool) -> tuple[int, int]:
    """Rows of a slice's factors and their bytes."""
    if not blocked:
        return 1, 4 * (2 if name == "gate_up" else 1)
    across, along = -(-hidden // FACTOR_BLOCK), -(-width // FACTOR_BLOCK)
    return (2 * along, 4 * across) if name == "gate_up" else (across, 4 * along)


def _codes_nbytes(fmt: str, cols: int) -> int:
    if fmt in SCALES_APART:
        weights, nbytes, _ = SCALES_APART[fmt]
        return cols // weights * nbytes
    return FORMATS[fmt].row_nbytes(cols)


def preferred_slices(units: int) -> int:
    """The divisor of ``units`` nearest to the preferred count; the smaller of two equally near."""
    divisors = (n for n in range(1, units + 1) if units % n == 0)
    return min(divisors, key=lambda n: (abs(n - PREFERRED_SLICES), n))


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple
