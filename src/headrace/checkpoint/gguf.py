"""GGUF files, one or split: header and tensor list checked, data mapped, nothing copied.

::

    magic "GGUF", version u32, number of tensors u64, number of metadata pairs u64
    metadata:     key string, type u32, value                            (see gguf_values)
    tensor list:  name string, number of dimensions u32, dimensions u64 each (fastest first),
                  type u32, offset u64 (from the start of the data, a multiple of the alignment)
    padding to the alignment (general.alignment, else 32), then the data

Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.gguf_values import Scanner
from headrace.checkpoint.mapped import MappedFile
from headrace.core.errors import CheckpointError, UnsupportedModelError
from headrace.core.numeric import GGUF_TYPES, NumericFormat
from headrace.core.words import counted

VERSIONS = (2, 3)  # version 1 had 32-bit lengths and was replaced within months
DEFAULT_ALIGNMENT = 32
# Alignment beyond the largest page size of the systems that we run on has no use.
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4  # GGML_MAX_DIMS
_INT64_MAX = 2**63 - 1
# The smallest pair: empty key, type, one byte; the smallest tensor: empty name, no dimensions.
_PAIR_NBYTES, _TENSOR_NBYTES = 13, 24
_FLOATS: Mapping[str, type[np.generic]] = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its format, its shape (slowest dimension first) and views of its bytes.

    ``parts``: ``data`` for f32, f16 and bf16 (two-byte floats as uint16), else ``blocks`` uint8
    [..., bytes of a row].
    """

    name: str
    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, npt.NDArray[Any]]
    path: Path

    @property
    def source(self) -> str:
        return f"{self.path}: {self.name}"


@dataclass(frozen=True)
class GgufFile:
    """Metadata (key -> bool, int, float, str or list of those) and tensors, of all parts."""

    path: Path  # of the first part
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    nbytes: int


def read_file(path: Path) -> GgufFile:
    """Map one file, or one part of a split, and check all of its header.

    Raises:
        CheckpointError: the file is damaged, truncated, or no GGUF file.
        UnsupportedModelError: a tensor's type is not implemented, or the file is big-endian.
    """
    file = MappedFile(path)
    scanner = Scanner(file)
    num_tensors, num_pairs = _read_counts(scanner)
    metadata = scanner.metadata(num_pairs)
    entries = [_read_entry(scanner) for _ in range(num_tensors)]
    alignment = _alignment(scanner, metadata)
    start = -(-scanner.position // alignment) * alignment
    _check_spans(scanner, entries, start, alignment)
    tensors = {e.name: _tensor(file, e, start) for e in entries}
    if len(tensors) != len(entries):
        names = [e.name for e in entries]
        twice = next(n for n in names if names.count(n) > 1)
        raise scanner.fail(f"tensor {twice!r} appears twice")
    return GgufFile(path, metadata, tensors, file.nbytes)


def read_summary(path: Path) -> Mapping[str, Any]:
    """The metadata in front of the tokenizer's, for listings: reads a few hundred bytes."""
    scanner = Scanner(MappedFile(path))
    _, num_pairs = _read_counts(scanner)
    return scanner.metadata(num_pairs, stop_before="tokenizer.")


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF model; any part of a split stands for all of them.

    Raises:
        CheckpointError: see ``read_file``; a part is missing, or belongs to another split.
        UnsupportedModelError: see ``read_file``.
    """
    first = read_file(path)
    count = first.metadata.get("split.count", 0)
    if count <= 1:
        return first
    paths = split_paths(path, count)
    parts = [first if p == path else read_file(p) for p in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        found = tuple(part.metadata.get(k) for k in ("split.no", "split.count"))
        if found != (number, count):
            raise CheckpointError(
                f"{part.path} says that it is part {found[0]} of {found[1]} (counted from 0), "
                f"expected part {number} of {count}",
                hint="the parts belong to different files, or were renamed",
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in {tensors[name].path} and in {part.path}",
                    hint="the parts belong to different files",
                )
            tensors[name] = tensor
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{paths[0]}: the {counted(count, 'part')} hold {counted(len(tensors), 'tensor')}, "
            f"split.tensors.count is {expected}",
            hint="the parts belong to different files",
        )
    return GgufFile(paths[0], parts[0].metadata, tensors, sum(p.nbytes for p in parts))


def split_paths(path: Path, count: int) -> list[Path]:
    """The files of a split in order, all of which must exist.

    Raises:
        CheckpointError: the file's name does not say which part it is, or a part is missing.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {counted(count, 'part')}, but its name is not of the form "
            f"NAME-00001-of-{count:05d}.gguf",
            hint="give the parts their original names",
        )
    paths = [path.parent / f"{match['stem']}-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing ({len(missing)} of {counted(count, 'part')})",
            hint="the download is incomplete: all parts are needed, in one directory",
        )
    return paths


def first_parts(paths: list[Path]) -> list[Path]:
    """Leave out every part of a split but the first."""
    kept: list[Path] = []
    for path in paths:
        match = _SPLIT_NAME.fullmatch(path.name)
        if match is None or int(match["no"]) == 1:
            kept.append(path)
    return kept


@dataclass(frozen=True)
class _Entry:
    """What the tensor list says; ``dims`` are slowest first, ``offset`` counts from the data."""

    name: str
    format: NumericFormat
    dims: tuple[int, ...]
    offset: int
    nbytes: int


def _read_counts(scanner: Scanner) -> tuple[int, int]:
    magic = scanner.u32("the magic")
    if magic != int.from_bytes(b"GGUF", "little"):
        raise CheckpointError(
            f"{scanner.path} is not a GGUF file: it starts with {magic.to_bytes(4, 'little')!r}",
            hint="old GGML files have to be converted; a web page was saved instead of a file "
            "where it starts with '<'",
        )
    version = scanner.u32("the version")
    if version not in VERSIONS:
        # The specification's own test: a small number read in the wrong byte order.
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(
                f"{scanner.path} is a big-endian GGUF file",
                hint="convert it to little-endian (gguf-convert-endian of the gguf package)",
            )
        raise UnsupportedModelError(
            f"{scanner.path} has GGUF version {version}",
            hint=f"supported versions: {', '.join(map(str, VERSIONS))}",
        )
    num_tensors = scanner.count("the number of tensors", _TENSOR_NBYTES)
    return num_tensors, scanner.count("the number of metadata pairs", _PAIR_NBYTES)


def _alignment(scanner: Scanner, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise scanner.fail(
            f"general.alignment is {value}, expected a power of two up to {MAX_ALIGNMENT}"
        )
    return value


def _read_entry(scanner: Scanner) -> _Entry:
    name = scanner.string("a tensor's name", limit=65_535)
    num_dims = scanner.u32(f"the dimensions of tensor {name!r}")
    if num_dims > MAX_DIMS:
        raise scanner.fail(
            f"tensor {name!r} has {counted(num_dims, 'dimension')}, at most {MAX_DIMS} exist"
        )
    fastest_first = [scanner.u64(f"a dimension of tensor {name!r}") for _ in range(num_dims)]
    type_id = scanner.u32(f"the type of tensor {name!r}")
    offset = scanner.u64(f"the offset of tensor {name!r}")
    if type_id not in GGUF_TYPES:
        supported = ", ".join(f"{i} {f.name}" for i, f in sorted(GGUF_TYPES.items()))
        raise UnsupportedModelError(
            f"{scanner.path}: tensor {name!r} has type id {type_id}, which is not implemented",
            hint=f"supported: {supported}",
        )
    form = GGUF_TYPES[type_id]
    row = fastest_first[0] if fastest_first else 1
    if row % form.block_weights:
        raise scanner.fail(
            f"tensor {name!r} ({form.name}) has rows of {counted(row, 'weight')}, expected a multiple of "
            f"{form.block_weights}"
        )
    # Python's integers do not wrap; a product of non-zero dimensions must also suit those that do.
    most = prod(d for d in fastest_first if d) * form.block_nbytes
    if most > _INT64_MAX:
        raise scanner.fail(f"tensor {name!r} has dimensions {fastest_first}: more than 2^63 bytes")
    nbytes = prod(fastest_first) // form.block_weights * form.block_nbytes
    if nbytes > scanner.end:
        raise scanner.fail(
            f"tensor {name!r} has dimensions {fastest_first} and needs {counted(nbytes, 'byte')}, the whole "
            f"file has {scanner.end}"
        )
    return _Entry(name, form, tuple(reversed(fastest_first)), offset, nbytes)


def _check_spans(scanner: Scanner, entries: list[_Entry], start: int, alignment: int) -> None:
    """Offsets are aligned, tensors lie in the file and do not overlap."""
    position, before = 0, ""
    needed, cut = start if entries else 0, ""
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset % alignment:
            raise scanner.fail(
                f"tensor {entry.name!r} lies at offset {entry.offset}, not a multiple of the "
                f"alignment {alignment}"
            )
        if entry.offset < position:
            raise scanner.fail(
                f"tensors {before!r} and {entry.name!r} overlap: the second starts at offset "
                f"{entry.offset}, the first ends at {position}"
            )
        position, before = entry.offset + entry.nbytes, entry.name
        needed = max(needed, start + position)
        cut = cut or (entry.name if start + position > scanner.end else "")
    if needed > scanner.end:
        raise scanner.fail(
            f"truncated: the header describes {counted(needed, 'byte')}, the file has {scanner.end}: "
            f"{counted(needed - scanner.end, 'byte is', 'bytes are')} missing, of tensor {cut!r} at least"
        )


def _tensor(file: MappedFile, entry: _Entry, start: int) -> GgufTensor:
    at, form = start + entry.offset, entry.format
    if form.name in _FLOATS:
        parts = {"data": file.view(at, entry.dims, _FLOATS[form.name])}
    else:
        shape = (*entry.dims[:-1], form.row_nbytes(entry.dims[-1]))
        parts = {"blocks": file.view(at, shape, np.uint8)}
    return GgufTensor(entry.name, form.name, entry.dims, parts, file.path)
