"""Which block formats are kept in two planes, codes and scales, where kernels read them.

Blocks of 17, 18, 22, 34, 110 and 210 bytes lie at odd multiples of one or two; without their scales the
codes are words of four bytes, which is how GPUs load them. The same bytes, in another order.
"""

from __future__ import annotations

# Of one block: the weights, and the bytes of codes and of scales.
SCALES_APART = {
    "mxfp4": (32, 16, 1),
    "nvfp4": (16, 8, 1),
    "q4_0": (32, 16, 2),
    "iq4_nl": (32, 16, 2),
    "q5_0": (32, 20, 2),
    "q8_0": (32, 32, 2),
    "q3_k": (256, 96, 14),
    "q6_k": (256, 192, 18),
}
# Of those, blocks that a file stores whole: where their scales begin.
SCALES_AT = {"q4_0": 0, "iq4_nl": 0, "q5_0": 0, "q8_0": 0, "q3_k": 96, "q6_k": 192}
_STORED_AS = {"mxfp4_gguf": "mxfp4"}
# A GPU's scratch memory for matrices that are expanded for the products of a prompt, band by band.
EXPAND_NBYTES = 64 * 2**20
# Formats of a checkpoint whose matrices a GPU multiplies as they are (``ops.triton.packed_few``).
PACKED_FORMATS = frozenset(
    (
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
        *("iq4_nl", "iq4_xs", "mxfp4", "mxfp4_gguf"),
    )
)


def kept_as(fmt: str) -> str:
    """The format that holds what a checkpoint stores in ``fmt``: its own, but of MXFP4 one order of codes."""
    return _STORED_AS.get(fmt, fmt)


def scale_bytes(fmt: str) -> tuple[int, int]:
    """Where the scales of a block begin and end in the file, for formats of ``SCALES_AT``."""
    first = SCALES_AT[fmt]
    return first, first + SCALES_APART[fmt][2]
