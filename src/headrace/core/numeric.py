"""Numeric formats as plain data: how many weights a block holds and how many bytes it takes.

The values themselves (bit layouts, references, kernels) live in ``headrace.formats``; this table is
what the planner, the checkpoint readers and the memory plan need, and it imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NumericFormat:
    """One storage format. ``gguf_type`` is the tensor type id of the GGUF specification."""

    name: str
    block_weights: int  # weights along the last dimension that share a block
    block_nbytes: int  # bytes of that block, scales included (tensor-wide scales are not)
    gguf_type: int | None = None
    note: str = ""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_nbytes / self.block_weights

    def row_nbytes(self, num_cols: int) -> int:
        """Bytes of one row of ``num_cols`` weights, a multiple of ``block_weights``."""
        return num_cols // self.block_weights * self.block_nbytes


FORMATS: dict[str, NumericFormat] = {
    f.name: f
    for f in (
        NumericFormat("f32", 1, 4, 0),
        NumericFormat("f16", 1, 2, 1),
        NumericFormat("bf16", 1, 2, 30),
        NumericFormat("q4_0", 32, 18, 2),
        NumericFormat("q4_1", 32, 20, 3),
        NumericFormat("q5_0", 32, 22, 6),
        NumericFormat("q5_1", 32, 24, 7),
        NumericFormat("q8_0", 32, 34, 8),
        NumericFormat("q2_k", 256, 84, 10),
        NumericFormat("q3_k", 256, 110, 11),
        NumericFormat("q4_k", 256, 144, 12),
        NumericFormat("q5_k", 256, 176, 13),
        NumericFormat("q6_k", 256, 210, 14),
        NumericFormat("iq4_nl", 32, 18, 20),
        NumericFormat("iq4_xs", 256, 136, 23),
        NumericFormat("mxfp4_gguf", 32, 17, 39, "scale inline; element j low, j + 16 high nibble"),
        NumericFormat(
            "mxfp4", 32, 17, None, "codes and scales apart; elements 2i low, 2i + 1 high"
        ),
        NumericFormat("nvfp4", 16, 9, None, "E4M3 scale per 16, one float32 scale per tensor"),
        NumericFormat("fp8_e4m3", 1, 1, None, "one float32 scale per tensor or per 128 x 128"),
    )
}

GGUF_TYPES: dict[int, NumericFormat] = {
    f.gguf_type: f for f in FORMATS.values() if f.gguf_type is not None
}
