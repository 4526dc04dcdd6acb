"""Numeric formats as plain data: how many weights a block holds and how many bytes it takes.

Bit layouts and references live in ``headrace.formats``; this table is what the planner, the
checkpoint readers and the memory plan need, and it imports nothing. The small code books that
several formats share (E2M1, E8M0, E4M3, IQ4) are here too, so that everybody reads one table.
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

# Formats of experts for which a GPU has kernels of their own that compute a prompt's experts side by side,
# and keep outputs in bfloat16 where experts have many tokens. All others are unpacked in tiles, and their
# outputs stay float32.
GROUPED_FORMATS = ("mxfp4", "mxfp4_gguf", "bf16")


# FP4 E2M1, indexed by code: one sign, two exponent (bias 1), one mantissa bit. No infinity, no NaN.
# OCP Microscaling Formats (MX) v1.0, section 5.3.3.
E2M1_VALUES: tuple[float, ...] = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)

# The 4-bit code book of IQ4_NL and IQ4_XS, indexed by code; each weight is scale * value.
# llama.cpp, ggml/src/ggml-common.h (kvalues_iq4nl).
IQ4_VALUES: tuple[int, ...] = (
    *(-127, -104, -83, -65, -49, -35, -22, -10),
    *(1, 13, 25, 38, 53, 69, 89, 113),
)


def e8m0_value(byte: int) -> float:
    """Decode an E8M0 scale: 2 ** (byte - 127), and NaN for 255.

    There is no zero, no sign and no infinity (OCP MX v1.0, section 5.4.1). Byte 0 is 2 ** -127,
    which float32 holds as a subnormal.
    """
    return float("nan") if byte == 0xFF else 2.0 ** (byte - 127)


def e4m3_value(byte: int) -> float:
    """Decode FP8 E4M3 in its finite variant (``fn``): bias 7, no infinity, NaN at 0x7F and 0xFF.

    Largest value 448 (0x7E), smallest normal 2 ** -6, smallest subnormal 2 ** -9 (OCP 8-bit
    Floating Point Specification v1.0, table 1).
    """
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E8M0_VALUES: tuple[float, ...] = tuple(e8m0_value(b) for b in range(256))
E4M3_VALUES: tuple[float, ...] = tuple(e4m3_value(b) for b in range(256))
