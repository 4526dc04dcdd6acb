"""What each architecture launches attention with: data, each row with the measurement that put it there.

The benchmarks ``benchmarks/attention/{decode,prefill}.py --sweep`` measure the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.ops.triton.control import interpreted

NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class DecodeTuning:
    """Of split-KV decoding. tile: keys of a step where pages are not the tile (bf16, f32).

    max_registers: of a thread, None for the compiler's choice; more programs at a time with fewer
    swapped: keys and values as rows of the products, query heads as columns; of plain pages only
    """

    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    source: str
    swapped: bool = True


@dataclass(frozen=True)
class PrefillTuning:
    """Of prefill. rows: query rows of a program; tile: keys of a step where pages are not the tile.

    tau: log2 of how far a score may exceed the running maximum before the output is rescaled, 0 for
        always; only with 16-bit probabilities
    polynomial: 1: every second exponential by the polynomial on the ordinary pipes
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    tau: int
    polynomial: int
    source: str


# By compute capability, "sealed" or "plain". (0, 0) is for the others.
DECODE: dict[tuple[tuple[int, int], str], DecodeTuning] = {
    # A prototype on an H200: 64 parts, 4
    # warps and 2 stages were the fastest of 2 to 3 stages and 4 to 8 warps.
    ((0, 0), "sealed"): DecodeTuning(0, 4, 2, None, NOT_MEASURED),
    ((9, 0), "sealed"): DecodeTuning(
        0, 4, 2, 128, f"four programs a multiprocessor instead of two; {NOT_MEASURED}"
    ),
    ((0, 0), "plain"): DecodeTuning(64, 4, 3, None, NOT_MEASURED),
    ((9, 0), "plain"): DecodeTuning(
        128, 4, 3, None, f"23 warp instructions a token instead of 30 at 64 keys; {NOT_MEASURED}"
    ),
}
PREFILL: dict[tuple[tuple[int, int], str], PrefillTuning] = {
    ((0, 0), "sealed"): PrefillTuning(64, 0, 4, 2, 0, 0, NOT_MEASURED),
    ((9, 0), "sealed"): PrefillTuning(128, 0, 8, 2, 0, 0, NOT_MEASURED),
    ((0, 0), "plain"): PrefillTuning(64, 64, 4, 2, 0, 0, NOT_MEASURED),
    ((9, 0), "plain"): PrefillTuning(
        128,
        128,
        8,
        2,
        0,
        0,
        f"566 instructions for 128 keys instead of 848 in two tiles; {NOT_MEASURED}",
    ),
}
# Tiny programs for the interpreter, whose time goes with their number of operations.
_INTERPRETED = PrefillTuning(32, 32, 4, 1, 0, 0, "for tests")
_WIDE = (
    128  # heads above it have half as many rows or keys a program, for shared memory and registers
)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) in the interpreter."""
    if interpreted() or device.type != "cuda":
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def decode_tuning(device: torch.device, dim: int, *, sealed: bool) -> DecodeTuning:
    """The launch of decoding over heads of ``dim``."""
    kind = "sealed" if sealed else "plain"
    found = DECODE.get((capability(device), kind), DECODE[((0, 0), kind)])
    return replace(found, tile=min(found.tile, 64)) if dim > _WIDE else found


def prefill_tuning(device: torch.device, dim: int, *, sealed: bool) -> PrefillTuning:
    """The launch of prefill over heads of ``dim``."""
    if interpreted():
        return _INTERPRETED
    kind = "sealed" if sealed else "plain"
    found = PREFILL.get((capability(device), kind), PREFILL[((0, 0), kind)])
    return replace(found, rows=64, tile=min(found.tile, 64), num_stages=2) if dim > _WIDE else found
