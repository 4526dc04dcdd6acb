"""From a checkpoint's raw tensors to packed weights: views, checked against the model's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.records import Checkpoint, RawTensor
from headrace.core.block_planes import PACKED_FORMATS
from headrace.core.config import PACKED
from headrace.core.errors import CheckpointError
from headrace.core.words import counted
from headrace.formats.base import FP8_BLOCK_ROWS, PackedTensor, dequantize
from headrace.formats.planes import in_planes

# NumPy carries two-byte floats as their bits.
_TWO_BYTE_FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16}

FLOAT_FORMATS = frozenset({"f32", "f16", "bf16"})
_DTYPES = {"f32": torch.float32, **_TWO_BYTE_FLOATS}

# Weights that are unpacked at once: 2^24 floats are 64 MiB beside what they become.
_CHUNK_ELEMENTS = 1 << 24
# Blocks that are taken apart at once.
_CHUNK_NBYTES = 1 << 26


class WeightSource:
    """Hands out a checkpoint's tensors by canonical name and remembers which were taken.

    Args:
        device: where they go; on the host they stay where they are mapped.
        dense_format: what ``matrix`` makes of every matrix: plain floats, or ``packed``, see ``to_packed``;
            None to leave them as stored.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dense_format: str | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dense_format = dense_format
        self._taken: set[str] = set()

    def on_host(self) -> WeightSource:
        """The same source, its tensors as stored and left where they are mapped; it remembers for both."""
        source = WeightSource(self._checkpoint, torch.device("cpu"))
        source._taken = self._taken
        return source

    def for_experts(self) -> WeightSource:
        """The same source for experts beside the other matrices, which are never packed."""
        if self._dense_format != PACKED:
            return self
        source = WeightSource(self._checkpoint, self._device, "bf16")
        source._taken = self._taken
        return source

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this canonical name."""
        return name in self._checkpoint.tensors

    def skip(self, name: str) -> None:
        """Mark a tensor as known and not needed."""
        self._taken.add(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor as stored, without a copy on the host.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        raw = self._raw(name, shape)
        parts = {key: self._tensor(part, raw.format) for key, part in raw.parts.items()}
        return PackedTensor(raw.format, tuple(raw.shape), parts)

    def matrix(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """``packed``, in the dense format if there is one."""
        if self._dense_format == PACKED:
            return to_packed(self.on_host().packed(name, shape), self._device)
        packed = self.packed(name, shape)
        return packed if self._dense_format is None else to_dense(packed, self._dense_format)

    def matrices(self, names: Sequence[str], shape: tuple[int, ...]) -> list[PackedTensor]:
        """``matrix`` of each name; in a dense format, views of one tensor that holds them all."""
        found = [self.matrix(name, shape) for name in names]
        if self._dense_format is None:
            return found
        stacked = torch.stack([m.parts["data"] for m in found])
        return [PackedTensor(m.format, m.shape, {"data": d}) for m, d in zip(found, stacked)]

    def small(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A small tensor (norm, bias, sinks, router) as float32.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        packed = self.packed(name, shape)
        if packed.format in FLOAT_FORMATS:
            return packed.parts["data"].float()
        return dequantize(packed)

    def optional(self, name: str, shape: tuple[int, ...], *, wanted: bool) -> torch.Tensor | None:
        """``small`` where the model has such a tensor, else None."""
        return self.small(name, shape) if wanted else None

    def require_all_taken(self) -> None:
        """Refuse a checkpoint with weights that the model would leave out.

        Raises:
            CheckpointError: names the first of them.
        """
        left = sorted(set(self._checkpoint.tensors) - self._taken)
        if left:
            raise CheckpointError(
                f"{self._checkpoint.tensors[left[0]].source}: the model has no place for "
                f"{left[0]!r} ({counted(len(left), 'such tensor')})",
                hint="the configuration and the weights belong to different models",
            )

    def _raw(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        raw = self._checkpoint.tensors.get(name)
        if raw is None:
            stored = _stored_name(self._checkpoint, name)
            raise CheckpointError(
                f"{self._checkpoint.path}: {stored} is missing, expected shape {list(shape)}",
                hint="the download is incomplete, or the configuration belongs to another model",
            )
        self._taken.add(name)
        if tuple(raw.shape) != shape:
            raise CheckpointError(
                f"{raw.source}: shape {list(raw.shape)}, expected {list(shape)} "
                "from the configuration",
                hint="the configuration and the weights belong to different models",
            )
        return raw

    def _tensor(self, part: npt.NDArray[Any], format_name: str) -> torch.Tensor:
        tensor = torch.from_numpy(part)  # pyright: ignore[reportUnknownMemberType]
        if part.dtype == np.uint16 and format_name in _TWO_BYTE_FLOATS:
            tensor = tensor.view(_TWO_BYTE_FLOATS[format_name])
        return tensor.to(self._device)


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    """The name under which the file would hold a canonical tensor, for messages."""
    family = checkpoint.family
    names = family.gguf_names if checkpoint.kind == "gguf" else family.hf_names
    pieces = name.split(".")
    layer = pieces[1] if pieces[0] == "layers" else ""
    expert = pieces[3] if len(pieces) > 4 and pieces[3].isdigit() else ""
    for stored, ours in names.items():
        if ours.replace("{i}", layer).replace("{e}", expert) == name:
            return stored.replace("{i}", layer).replace("{e}", expert)
    return name


def split_rows(stacked: PackedTensor, *, interleaved: bool) -> tuple[PackedTensor, PackedTensor]:
    """Cut a joined [experts, 2 I, D] into gate and up [experts, I, D], as views.

    ``interleaved``: rows 2i are gate, 2i + 1 up; else the first half is gate, the second up.

    Raises:
        CheckpointError: fp8 block scales (of 128 rows) do not fall apart that way.
    """
    half = stacked.rows // 2
    gate: dict[str, torch.Tensor] = {}
    up: dict[str, torch.Tensor] = {}
    for name, part in stacked.parts.items():
        if name == "global_scale" or (name == "scale" and part.ndim < 2):
            gate[name] = up[name] = part
        elif name == "scale":
            if interleaved or half % 128:
                raise CheckpointError(
                    f"fp8 blocks of 128 rows cross from gate to up in a joined tensor of "
                    f"{counted(stacked.rows, 'row')}",
                    hint="store gate and up apart",
                )
            gate[name], up[name] = part[..., : half // 128, :], part[..., half // 128 :, :]
        elif interleaved:
            gate[name], up[name] = part[..., 0::2, :], part[..., 1::2, :]
        else:
            gate[name], up[name] = part[..., :half, :], part[..., half:, :]
    shape = (*stacked.shape[:-2], half, stacked.cols)
    return PackedTensor(stacked.format, shape, gate), PackedTensor(stacked.format, shape, up)


def to_packed(stored: PackedTensor, device: torch.device) -> PackedTensor:
    """A matrix on the host as products of packed matrices take it, on ``device``.

    Blocks stay as they are, their codes and scales apart where kernels read them so (``formats.planes``).
    Formats with factors, and float32, become bfloat16.
    """
    if stored.format in ("bf16", "f16"):
        return PackedTensor(stored.format, stored.shape, {"data": stored.parts["data"].to(device)})
    if stored.format not in PACKED_FORMATS:
        return to_dense(_moved(stored, device), "bf16")
    step = max(_CHUNK_NBYTES * stored.rows // stored.nbytes, 1)
    parts: dict[str, torch.Tensor] = {}
    fmt = stored.format
    for start in range(0, stored.rows, step):
        stop = min(start + step, stored.rows)
        band = in_planes(_moved(stored.row_range(start, stop), device))
        fmt = band.format
        for name, part in band.parts.items():
            if name not in parts:
                parts[name] = part.new_empty((stored.rows, part.shape[-1]))
            parts[name][start:stop] = part
    return PackedTensor(fmt, stored.shape, parts)


def _moved(packed: PackedTensor, device: torch.device) -> PackedTensor:
    parts = {name: part.to(device) for name, part in packed.parts.items()}
    return PackedTensor(packed.format, packed.shape, parts)


def to_dense(packed: PackedTensor, name: str) -> PackedTensor:
    """``packed`` in a format of plain floats, on its device; itself if it is in it already."""
    if packed.format == name:
        return packed
    dtype = _DTYPES[name]
    if packed.format in FLOAT_FORMATS:
        return PackedTensor(name, packed.shape, {"data": packed.parts["data"].to(dtype)})
    device = next(iter(packed.parts.values())).device
    data = torch.empty(packed.shape, dtype=dtype, device=device)
    elements = data[..., :1, :].numel()  # of a row of every expert
    step = max(_CHUNK_ELEMENTS // elements // FP8_BLOCK_ROWS, 1) * FP8_BLOCK_ROWS
    for start in range(0, packed.rows, step):
        stop = min(start + step, packed.rows)
        data[..., start:stop, :] = dequantize(packed.row_range(start, stop))
    return PackedTensor(name, packed.shape, {"data": data})


def transpose_stacked(stored: PackedTensor) -> PackedTensor:
    """[experts, in, out] -> [experts, out, in]; the only weights that are copied at load."""
    data = stored.parts["data"].transpose(1, 2).contiguous()
    return PackedTensor(stored.format, tuple(data.shape), {"data": data})
