"""NaN block scales: found before a tensor is used, and set to zero if the user asks for it.

One NaN scale in a row that is never looked up still makes every logit NaN, so scales are checked.
Where scales lie inside the blocks (GGUF) that reads every page of the tensor once, about what
loading costs anyway: 30 ms for SmolLM2's 98 MB in the page cache (Zen 3, 2026-11), the time of
reading the file on a cold disk. So it is not done when a checkpoint is opened (the server opens one
for its tokenizer alone), but when a tensor is taken for the first time: ``CheckedTensors`` cannot
be gone around.

Only scales are looked at: plain floats and FP8 codes are weights, and are not read here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.records import RawTensor
from headrace.core.errors import CheckpointError
from headrace.core.numeric import FORMATS
from headrace.core.words import counted

log = logging.getLogger(__name__)

# Byte offsets of the float16 scales (and minima) in a block; drawn in headrace.formats.
_HALVES: Mapping[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
# Blocks scanned at a time: the masks stay in the cache, and no memory to speak of is needed.
_CHUNK = 1 << 16

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ScaleRepair:
    """Blocks whose scale was NaN and that stand for zeros now; ``block`` is the first of them."""

    tensor: str
    source: str
    block: int
    num_blocks: int


class CheckedTensors(Mapping[str, RawTensor]):
    """Tensors by canonical name, each scanned for NaN scales when it is first taken.

    Args:
        tensors: as read from the files.
        repair: set NaN scales to zero in the copy-on-write map, and report it, instead of raising.
            The file is not changed, and only the damaged pages are copied.
    """

    def __init__(self, tensors: Mapping[str, RawTensor], *, repair: bool = False) -> None:
        self._tensors = tensors
        self._repair = repair
        self._clean: set[str] = set()
        self._repairs: list[ScaleRepair] = []

    def __getitem__(self, name: str) -> RawTensor:
        """The tensor.

        Raises:
            CheckpointError: one of its block scales is NaN, and they are not to be repaired.
        """
        raw = self._tensors[name]
        if name not in self._clean:
            self._check(raw)
            self._clean.add(name)
        return raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def unchecked(self) -> Mapping[str, RawTensor]:
        """The same tensors without a look at their bytes: for sizes, shapes and sources."""
        return self._tensors

    @property
    def repairs(self) -> tuple[ScaleRepair, ...]:
        """What was repaired in the tensors taken so far."""
        return tuple(self._repairs)

    def _check(self, raw: RawTensor) -> None:
        block = find_nan_scale(raw)
        if block is None:
            return
        if not self._repair:
            raise CheckpointError(
                f"{raw.source}: the scale of block {block}{_where(raw, block)} is NaN",
                hint="download the file again; if it was published so, --repair-nan-scales sets "
                "such scales to zero in memory",
            )
        count = zero_nan_scales(raw)
        self._repairs.append(ScaleRepair(raw.name, raw.source, block, count))
        log.warning(
            "%s: %s with a NaN scale set to zero, the first is block %d%s",
            raw.source,
            counted(count, "block"),
            block,
            _where(raw, block),
        )


def _where(raw: RawTensor, block: int) -> str:
    """Row and columns of a block, in words."""
    width = 128 if raw.format == "fp8_e4m3" else FORMATS[raw.format].block_weights
    if raw.format == "fp8_e4m3" and raw.parts["scale"].ndim < 2:
        return ""
    row, column = divmod(block, -(-raw.shape[-1] // width))
    unit = "rows" if raw.format == "fp8_e4m3" else "row"
    first = row * 128 if unit == "rows" else row
    return f" ({unit} {first}{' on' if unit == 'rows' else ''}, columns {column * width} on)"


def find_nan_scale(raw: RawTensor) -> int | None:
    """The flat index of the first block whose scale is NaN, or None.

    A NaN scale of a whole matrix damages its first block first. FP8 counts its scales as blocks.
    """
    found: list[int] = []
    for first, damaged, _ in _damage(raw):
        if bool(damaged.any()):
            found.append(first + int(damaged.argmax()))
            if raw.format != "nvfp4":  # whose global scales come before its block scales
                break
    return min(found, default=None)


def zero_nan_scales(raw: RawTensor) -> int:
    """Make every block with a NaN scale stand for zeros, in place; return how many there were."""
    count = 0
    for _, damaged, clear in _damage(raw):
        where = np.flatnonzero(damaged)
        if where.size:
            clear(where)
            count += int(where.size)
    return count


def _damage(raw: RawTensor) -> Iterator[tuple[int, Mask, Any]]:
    """Yield piece by piece: the first block's index, which blocks are NaN, how to clear some."""
    parts = raw.parts
    if raw.format in _HALVES or raw.format == "mxfp4_gguf":
        yield from _inline(raw)
    elif raw.format == "mxfp4":
        codes = parts["codes"].reshape(-1, 16)
        yield from _apart(parts["scales"], _is_e8m0_nan, codes)
    elif raw.format == "nvfp4":
        yield from _global(parts["global_scale"], raw)
        yield from _apart(parts["scales"], _is_e4m3_nan, None)
    elif raw.format == "fp8_e4m3":
        scale = parts["scale"]
        yield 0, np.isnan(scale).reshape(-1), _clear(scale.reshape(-1))


def _clear(*flat: npt.NDArray[Any]) -> Any:
    def clear(where: npt.NDArray[np.intp]) -> None:
        for array in flat:
            array[where] = 0

    return clear


def _global(scale: npt.NDArray[np.float32], raw: RawTensor) -> Iterator[tuple[int, Mask, Any]]:
    """One scale per matrix: its damage shows in the matrix' first block."""
    blocks = raw.shape[-2] * raw.shape[-1] // 16
    flat = scale.reshape(-1)
    for index in range(flat.size):
        yield index * blocks, np.isnan(flat[index : index + 1]), _clear(flat[index : index + 1])


def _apart(scales: Bytes, is_nan: Any, codes: Bytes | None) -> Iterator[tuple[int, Mask, Any]]:
    """Scales in a tensor of their own; ``codes`` [blocks, n] are cleared with them."""
    flat = scales.reshape(-1)
    for first in range(0, flat.size, _CHUNK):
        piece = flat[first : first + _CHUNK]
        cleared = [piece] if codes is None else [piece, codes[first : first + _CHUNK]]
        yield first, is_nan(piece), _clear(*cleared)


def _inline(raw: RawTensor) -> Iterator[tuple[int, Mask, Any]]:
    """Scales inside the blocks."""
    nbytes = FORMATS[raw.format].block_nbytes
    blocks = raw.parts["blocks"].reshape(-1, nbytes)
    for first in range(0, len(blocks), _CHUNK):
        piece = blocks[first : first + _CHUNK]
        if raw.format == "mxfp4_gguf":
            # E8M0 has no zero: the codes must be zero too for the block to stand for zeros.
            yield first, _is_e8m0_nan(piece[:, 0]), _clear(piece)
            continue
        damaged = np.zeros(len(piece), np.bool_)
        fields = [piece[:, at : at + 2].view("<u2")[:, 0] for at in _HALVES[raw.format]]
        for field in fields:
            damaged |= (field & 0x7FFF) > 0x7C00
        # Scale and minimum both: with one of them left the block would not stand for zeros.
        yield first, damaged, _clear(*fields)


def _is_e8m0_nan(scales: Bytes) -> Mask:
    return scales == 0xFF


def _is_e4m3_nan(scales: Bytes) -> Mask:
    return (scales & 0x7F) == 0x7F
