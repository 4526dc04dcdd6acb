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


# By compute capability, "sealed" or "plain". (0, 0) is for the others. Measured on an H200 on 2026-11-30
# (`benchmarks.attention.decode --sweep`, GQA 32:8, heads of 128), batch 1 at 128K / batch 8 at 32K in us.
# A page's place comes from a table: of S stages (S - 1) / 2 hold keys and values, so that 2 to 4 overlap
# nothing.
DECODE: dict[tuple[tuple[int, int], str], DecodeTuning] = {
    ((0, 0), "sealed"): DecodeTuning(0, 4, 2, None, NOT_MEASURED),
    ((9, 0), "sealed"): DecodeTuning(
        0, 4, 5, None, "fp8 71.6 / 149.6; 128 registers 79.3 / 143.3; and 2 stages 100.6 / 140.5"
    ),
    ((0, 0), "plain"): DecodeTuning(64, 4, 5, None, NOT_MEASURED, swapped=False),
    ((9, 0), "plain"): DecodeTuning(
        64,
        4,
        5,
        None,
        "126.9 / 262.4, 67.8 at 1 x 64K; tile 32, 7 stages 125.1 / 277.1, 67.1; 32, 5 stages 8 x 32K 268.6, "
        "67.6; tile 128, 3 stages 8 x 32K 263.7, 70.8; 8 warps 265.7, 68.3; 7 stages 130.0 / 302.8, 71.7; "
        "swapped, tile 128, before early starts, 145.9 / 291.3: its values are not loaded ahead",
        swapped=False,
    ),
}
PREFILL: dict[tuple[tuple[int, int], str], PrefillTuning] = {
    ((0, 0), "sealed"): PrefillTuning(64, 0, 4, 2, 0, 0, NOT_MEASURED),
    ((9, 0), "sealed"): PrefillTuning(
        128, 0, 4, 5, 0, 0, "16K causal: 7.8 ms, fp8 6.1; 2 stages 7.9, 6.3; 8 warps 10.6, 9.3"
    ),
    ((0, 0), "plain"): PrefillTuning(64, 64, 4, 2, 0, 0, NOT_MEASURED),
    ((9, 0), "plain"): PrefillTuning(
        128, 128, 8, 2, 0, 1, "16K causal: 6.0 ms; no polynomial 6.4; tile 64, 5 stages 6.3; tau 8 6.9"
    ),
}  # fmt: skip
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
    return replace(found, tile=min(found.tile, 32)) if dim > _WIDE else found


def prefill_tuning(device: torch.device, dim: int, *, sealed: bool) -> PrefillTuning:
    """The launch of prefill over heads of ``dim``."""
    if interpreted():
        return _INTERPRETED
    kind = "sealed" if sealed else "plain"
    found = PREFILL.get((capability(device), kind), PREFILL[((0, 0), kind)])
    return replace(found, rows=64, tile=min(found.tile, 64), num_stages=2) if dim > _WIDE else found
