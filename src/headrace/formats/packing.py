"""Helpers that the format files are built from: unpacking bits, walking over rows, rounding.

Together with ``base`` the only module of this package that a format may import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from headrace.core.errors import UserError
from headrace.core.numeric import E2M1_VALUES, FORMATS
from headrace.formats.base import Format, PackedTensor, Part, blocks_per_row, check_layout

# Rows are decoded and scanned in pieces of about this many weights, or bytes: temporaries then stay
# in the last-level cache, and a check of a large tensor needs no memory to speak of.
CHUNK = 1 << 20


def row_chunks(part: torch.Tensor, weights: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Walk over ``part`` [..., rows, n] in views of whole rows, [r, n] each, in storage order.

    Args:
        weights: how much of ``CHUNK`` one row takes.

    Yields:
        The flat index of the view's first row, and the view. Leading and row strides are free.
    """
    if part.ndim == 1:
        part = part.unsqueeze(0)
    if part.numel() == 0:
        return
    if part.ndim > 2:
        rows = part.shape[1:-1].numel()
        for i, sub in enumerate(part):
            for first, view in row_chunks(sub, weights):
                yield i * rows + first, view
        return
    step = max(1, CHUNK // max(1, weights))
    for first in range(0, part.shape[0], step):
        yield first, part[first : first + step]


def lookup(table: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    """Map uint8 codes to float32 through a code book of up to 256 values."""
    values = torch.tensor(table, dtype=torch.float32, device=codes.device)
    return values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def shifted(codes: torch.Tensor, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """Unpack bit fields: uint8 [..., n] -> uint8 [..., len(shifts), n], one plane per shift."""
    return torch.stack([(codes >> shift) & mask for shift in shifts], dim=-2)


def half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Read the little-endian float16 at byte ``offset`` of each block: [n, bytes] -> f32 [n, 1]."""
    raw = blocks[:, offset : offset + 2].clone(memory_format=torch.contiguous_format)
    return raw.view(torch.float16).to(torch.float32)


def k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack Q4_K's and Q5_K's 6-bit scales and minima: uint8 [n, 12] -> two float32 [n, 8].

    The packing is drawn in ``formats/q4_k.py``.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 0x3F, (rest & 0xF) | ((first >> 2) & 0x30)), dim=1)
    minimum = torch.cat((second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scale.to(torch.float32), minimum.to(torch.float32)


def pairs_interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Unpack nibbles, element 2i from the low and 2i + 1 from the high: [r, n] -> [r, 2n]."""
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def nearest_code(magnitude: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Round to the nearest of ascending ``values`` (their indices are the codes), ties to even.

    The largest value saturates. ``magnitude`` is float64 and not negative: quotients of float32
    numbers by the products of a float32 and a few-bit scale cannot fall so near a midpoint of these
    code books that float64 would confuse them, so ties are exact.
    """
    grid = torch.tensor(values, dtype=torch.float64, device=magnitude.device)
    middle = (grid[1:] + grid[:-1]) / 2
    low = torch.searchsorted(middle, magnitude.contiguous())
    tie = middle[low.clamp(max=len(values) - 2)] == magnitude
    return (low + (tie & (low % 2 == 1))).to(torch.uint8)


def check_quantizable(name: str, values: torch.Tensor) -> None:
    """Refuse what no encoder here can represent: non-finite numbers, or a row of part blocks."""
    blocks_per_row(name, tuple(values.shape))
    if not bool(torch.isfinite(values).all()):
        raise UserError(
            f"cannot quantise to {name}: the tensor holds NaN or infinite values",
            hint="repair the tensor before quantising it",
        )


# For each float dtype: the integer dtype of its size, and the bits of infinity. Larger is NaN.
NAN_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}


def plain_format(name: str, dtype: torch.dtype) -> Format:
    """Build the record of a format whose blocks are single floats of a dtype that torch knows."""

    def layout(shape: tuple[int, ...]) -> Mapping[str, Part]:
        return {"data": Part(dtype, (shape,))}

    def decode(packed: PackedTensor) -> torch.Tensor:
        check_layout(packed, layout)
        return packed.parts["data"].to(torch.float32)

    bits, infinity = NAN_BITS[dtype]
    magnitude = torch.iinfo(bits).max  # all bits but the sign

    def damaged(packed: PackedTensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        check_layout(packed, layout)
        data = packed.parts["data"]
        for first, rows in row_chunks(data, data.shape[-1] if data.ndim else 1):
            # A masked maximum of integers: ten times as fast as isnan where nothing is wrong.
            if int((rows.view(bits) & magnitude).max()) > infinity:
                yield first, rows, torch.isnan(rows)

    def find(packed: PackedTensor) -> int | None:
        for first, rows, bad in damaged(packed):
            return first * rows.shape[1] + first_true(bad)
        return None

    def zero(packed: PackedTensor) -> int:
        repaired = 0
        for _, rows, bad in damaged(packed):
            repaired += zero_where(rows, bad)
        return repaired

    def encode(values: torch.Tensor) -> PackedTensor:
        return PackedTensor(name, tuple(values.shape), {"data": values.to(dtype)})

    return Format(name, decode, find, zero, layout, encode)


def mx_encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 blocks [n, 32] in MXFP4: E2M1 codes uint8 [n, 32], E8M0 scales uint8 [n, 1].

    The scale is 2 ** (floor(log2 amax) - 2), 2 being E2M1's largest exponent, limited to E8M0's
    range; codes are to nearest with ties to even, and saturate (OCP MX v1.0, section 6.3).
    """
    exact = values.to(torch.float64)
    amax = exact.abs().amax(1, keepdim=True)
    exponent = torch.frexp(amax).exponent - 1  # amax = mantissa * 2 ** exponent, 1 <= mantissa < 2
    byte = (exponent - 2 + 127).clamp(0, 254)
    byte = torch.where(amax == 0, 0, byte)
    codes = nearest_code(torch.ldexp(exact.abs(), 127 - byte), E2M1_VALUES[:8])
    return codes | torch.signbit(values).to(torch.uint8) << 3, byte.to(torch.uint8)


def first_true(bad: torch.Tensor) -> int:
    """Return the flat index of the first true element of a bool tensor that has one."""
    return int(bad.flatten().to(torch.uint8).argmax())


def zero_where(part: torch.Tensor, bad: torch.Tensor) -> int:
    """Set ``part[bad]`` to zero, writing nowhere else; return how many there were."""
    if not bool(bad.any()):
        return 0
    where = bad.nonzero(as_tuple=True)
    part.index_put_(where, torch.zeros((), dtype=part.dtype, device=part.device))
    return len(where[0])


def gguf_format(
    name: str,
    decode_blocks: Callable[[torch.Tensor], torch.Tensor],
    halves: Sequence[int],
    encode_blocks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Format:
    """Build the record of a GGUF block type with float16 scales.

    Args:
        name: a key of ``core.numeric.FORMATS``.
        decode_blocks: uint8 [n, block bytes] -> float32 [n, block weights].
        halves: byte offsets of the float16 scales (and minima) inside a block.
        encode_blocks: the reverse, if the format has an encoder here.
    """

    def nan_scale(blocks: torch.Tensor) -> torch.Tensor:
        bad = torch.zeros(blocks.shape[:2], dtype=torch.bool, device=blocks.device)
        for offset in halves:
            # NaN: exponent all ones and a mantissa that is not zero, 5 and 10 bits.
            high = blocks[..., offset + 1] & 0x7F
            if int(high.max()) < 0x7C:
                continue
            bad |= (high > 0x7C) | ((high == 0x7C) & (blocks[..., offset] != 0))
        return bad

    def repair(blocks: torch.Tensor, where: tuple[torch.Tensor, ...]) -> None:
        zero = torch.zeros((), dtype=torch.uint8, device=blocks.device)
        for offset in halves:
            for byte in (offset, offset + 1):
                blocks[..., byte].index_put_(where, zero)

    encode = None
    if encode_blocks is not None:
        encode = _block_encoder(name, encode_blocks)
    return block_format(name, decode_blocks, nan_scale, repair, encode)


def _block_encoder(
    name: str, encode_blocks: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], PackedTensor]:
    weights = FORMATS[name].block_weights

    def encode(values: torch.Tensor) -> PackedTensor:
        check_quantizable(name, values)
        blocks = encode_blocks(values.to(torch.float32).reshape(-1, weights))
        shape = (*values.shape[:-1], FORMATS[name].row_nbytes(values.shape[-1]))
        return PackedTensor(name, tuple(values.shape), {"blocks": blocks.reshape(shape)})

    return encode


def block_format(
    name: str,
    decode_blocks: Callable[[torch.Tensor], torch.Tensor],
    nan_scale: Callable[[torch.Tensor], torch.Tensor],
    repair: Callable[[torch.Tensor, tuple[torch.Tensor, ...]], None],
    encode: Callable[[torch.Tensor], PackedTensor] | None,
) -> Format:
    """Build the record of a format stored as one part, ``blocks`` uint8 [..., bytes of a row].

    Args:
        nan_scale: uint8 [rows, blocks, block bytes] -> bool [rows, blocks], which have NaN scales.
        repair: makes the blocks at these indices of such a view stand for zeros.
    """
    weights, nbytes = FORMATS[name].block_weights, FORMATS[name].block_nbytes

    def layout(shape: tuple[int, ...]) -> Mapping[str, Part]:
        row = blocks_per_row(name, shape) * nbytes
        return {"blocks": Part(torch.uint8, ((*shape[:-1], row),))}

    def decode(packed: PackedTensor) -> torch.Tensor:
        check_layout(packed, layout)
        blocks, cols = packed.parts["blocks"], packed.cols
        out = torch.empty(packed.shape, dtype=torch.float32, device=blocks.device)
        flat = out.view(-1, cols) if out.numel() else out
        for first, rows in row_chunks(blocks, cols):
            values = decode_blocks(rows.reshape(-1, nbytes))
            flat[first : first + rows.shape[0]] = values.view(-1, cols)
        return out

    def damaged(packed: PackedTensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        check_layout(packed, layout)
        for first, rows in row_chunks(packed.parts["blocks"], packed.cols // weights * nbytes):
            blocks = rows.view(rows.shape[0], -1, nbytes)
            yield first, blocks, nan_scale(blocks)

    def find(packed: PackedTensor) -> int | None:
        for first, blocks, bad in damaged(packed):
            if bool(bad.any()):
                return first * blocks.shape[1] + first_true(bad)
        return None

    def zero(packed: PackedTensor) -> int:
        repaired = 0
        for _, blocks, bad in damaged(packed):
            if bool(bad.any()):
                where = bad.nonzero(as_tuple=True)
                repair(blocks, where)
                repaired += len(where[0])
        return repaired

    return Format(name, decode, find, zero, layout, encode)
