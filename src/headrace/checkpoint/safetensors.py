"""Safetensors: a length, a JSON header, the data. Every number is checked before it is used.

::

    0          8                 8 + n                              end of file
    | n (u64)  | JSON, n bytes   | data: spans of the tensors, back to back |

    {"name": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [begin, end]}, ...}

Source: the format's README (huggingface/safetensors). As its own library does, we refuse data that
no tensor covers: a file of another length than its header says is not the file that was written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.mapped import MappedFile
from headrace.checkpoint.strict_json import parse_object, read_object
from headrace.core.errors import CheckpointError
from headrace.core.words import counted, plural

# The limit of the format's own library.
MAX_HEADER_NBYTES = 100_000_000
# More than any stored weight has; NumPy 1.26 stops at 32.
MAX_DIMS = 8
_INT64_MAX = 2**63 - 1

# NumPy has no two-byte bfloat, and no eight-bit floats: they come as their bits, and so does F16.
DTYPES: Mapping[str, type[np.generic]] = {
    "BOOL": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.uint16,
    "BF16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
}

INDEX_SUFFIX = ".safetensors.index.json"

_AGAIN = "the file is damaged or incomplete: download it again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a safetensors file holds it; ``data`` is a view of the map (see ``DTYPES``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    path: Path

    @property
    def source(self) -> str:
        return f"{self.path}: {self.name}"


@dataclass(frozen=True)
class StoredFiles:
    """The tensors of a directory; ``notes`` tell what was found and not used."""

    tensors: Mapping[str, StoredTensor]
    nbytes: int  # of the files that were opened
    notes: tuple[str, ...] = ()


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Map one file and return its tensors.

    Raises:
        CheckpointError: anything that the header says is impossible for this file.
    """
    file = MappedFile(path)
    header, start = _read_header(file)
    entries = {
        name: _check_entry(path, name, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    needed = start + max((e.end for e in entries.values()), default=0)
    if needed > file.nbytes:
        cut = next(name for name, e in entries.items() if start + e.end > file.nbytes)
        raise CheckpointError(
            f"{path} is truncated: its header describes {counted(needed, 'byte')}, the file has "
            f"{file.nbytes}: {counted(needed - file.nbytes, 'byte is', 'bytes are')} missing, "
            f"of tensor {cut!r} at least",
            hint=_AGAIN,
        )
    _check_cover(path, entries, file.nbytes - start)
    return {
        name: StoredTensor(
            name, e.dtype, e.shape, file.view(start + e.begin, e.shape, DTYPES[e.dtype]), path
        )
        for name, e in entries.items()
    }


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The parsed header and the byte at which the data starts."""
    path = file.path
    if file.nbytes < 8:
        raise CheckpointError(
            f"{path} has {counted(file.nbytes, 'byte')}, a safetensors file has at least 8: "
            f"{counted(8 - file.nbytes, 'byte is', 'bytes are')} missing",
            hint=_AGAIN,
        )
    (length,) = struct.unpack_from("<Q", file.raw, 0)
    if length > MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{path}: the header claims {counted(length, 'byte')}, at most {MAX_HEADER_NBYTES} are allowed",
            hint="this is not a safetensors file, or it is damaged",
        )
    if 8 + length > file.nbytes:
        raise CheckpointError(
            f"{path} is truncated: the header claims {counted(length, 'byte')}, "
            f"{8 + length - file.nbytes} of them are missing",
            hint=_AGAIN,
        )
    return parse_object(bytes(file.raw[8 : 8 + length]), f"{path}: its header"), 8 + length


def _are_counts(value: Any) -> bool:
    """Whether ``value`` is a list of whole numbers of at least zero that fit in 64 bits."""
    if not isinstance(value, list):
        return False
    # JSON's numbers are exactly int or float, and its booleans exactly bool.
    return all(type(v) is int and 0 <= v <= _INT64_MAX for v in cast("list[Any]", value))


def _wrong_entry(path: Path, name: str, what: str, found: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name!r}: {what} is {str(found)[:80]}, expected {expected}", hint=_AGAIN
    )


@dataclass(frozen=True)
class _Entry:
    """What the header says of one tensor; the span counts from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _check_entry(path: Path, name: str, entry: Any) -> _Entry:
    """Return an entry that makes sense in itself."""

    wrong = partial(_wrong_entry, path, name)
    if not isinstance(entry, dict):
        raise wrong("its entry", entry, "an object")
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong("dtype", dtype, f"one of {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(cast("list[int]", shape)) > MAX_DIMS:
        raise wrong("shape", shape, f"a list of at most {MAX_DIMS} whole numbers")
    if not _are_counts(offsets) or len(cast("list[int]", offsets)) != 2:
        raise wrong("data_offsets", offsets, "two whole numbers")
    dims = tuple(cast("list[int]", shape))
    begin, end = cast("list[int]", offsets)
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    # A zero would hide an overflow of the other dimensions from NumPy.
    if prod(d for d in dims if d) * itemsize > _INT64_MAX:
        raise wrong("shape", list(dims), "fewer than 2^63 bytes")
    if end - begin != prod(dims) * itemsize:
        raise wrong(
            f"its span {begin} to {end}",
            counted(end - begin, "byte"),
            f"{prod(dims) * itemsize}",
        )
    return _Entry(dtype, dims, begin, end)


def _check_cover(path: Path, entries: Mapping[str, _Entry], available: int) -> None:
    """Tensors must follow each other without overlap or gap, to the end of the file."""
    position, before = 0, ""
    for begin, end, name in sorted((e.begin, e.end, name) for name, e in entries.items()):
        if begin < position:
            raise CheckpointError(
                f"{path}: tensors {before!r} and {name!r} overlap: the second starts at byte "
                f"{begin} of the data, the first ends at {position}",
                hint=_AGAIN,
            )
        if begin > position:
            raise CheckpointError(
                f"{path}: {counted(begin - position, 'byte')} before tensor {name!r} "
                f"{plural(begin - position, 'belongs', 'belong')} to no tensor",
                hint=_AGAIN,
            )
        position, before = end, name
    if position != available:
        raise CheckpointError(
            f"{path}: the data has {counted(available, 'byte')}, its tensors end at byte {position}",
            hint=_AGAIN,
        )


def read_directory(directory: Path) -> StoredFiles:
    """Open the weights of a Hugging Face directory.

    With an index, the index alone decides which file a tensor comes from; copies in other files and
    tensors that it does not list are left alone and reported. Without one, all files are read, and
    a tensor that two of them hold is an error.

    Raises:
        CheckpointError: no weights, a missing file or tensor, a damaged file or index.
    """
    index = _find_index(directory)
    if index is not None:
        return _read_indexed(directory, index)
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"{directory} holds no .safetensors file",
            hint="weights in other formats (.bin, .pt) are not read: convert them to safetensors",
        )
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in {tensors[name].path} and in {path}, and there is no "
                    "index that says which one counts",
                    hint="remove the file that does not belong to the model, or add "
                    "model.safetensors.index.json",
                )
            tensors[name] = tensor
    return StoredFiles(tensors, sum(p.stat().st_size for p in paths))


def _find_index(directory: Path) -> Path | None:
    preferred = directory / f"model{INDEX_SUFFIX}"
    if preferred.is_file():
        return preferred
    found = sorted(directory.glob("*" + INDEX_SUFFIX))
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} holds {len(found)} indexes: {', '.join(p.name for p in found)}",
            hint="keep the one that belongs to the model, or name it model.safetensors.index.json",
        )
    return found[0] if found else None


def _read_weight_map(index: Path) -> dict[str, str]:
    weights = read_object(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index} has no weight_map", hint=_AGAIN)
    for name, file in cast("dict[str, Any]", weights).items():
        # A plain file name: an index must not lead out of its directory.
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise CheckpointError(
                f"{index}: weight_map gives {name!r} the file {file!r}, expected a plain file name",
                hint=_AGAIN,
            )
    return cast("dict[str, str]", weights)


def _read_indexed(directory: Path, index: Path) -> StoredFiles:
    weights = _read_weight_map(index)
    files: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weights.values())):
        if not (directory / file).is_file():
            names = sorted(n for n, f in weights.items() if f == file)
            raise CheckpointError(
                f"{directory / file} is missing: {index.name} expects {counted(len(names), 'tensor')} in it, "
                f"{names[0]!r} among them",
                hint="the download is incomplete: fetch the file",
            )
        files[file] = read_file(directory / file)
    tensors: dict[str, StoredTensor] = {}
    for name, file in weights.items():
        if name not in files[file]:
            raise CheckpointError(
                f"{directory / file} has no tensor {name!r}, which {index.name} expects in it",
                hint="the index and the file belong to different versions of the model",
            )
        tensors[name] = files[file][name]
    notes: list[str] = []
    for file, held in files.items():
        for name in held:
            if name not in weights:
                notes.append(f"{file}: tensor {name!r} is not in {index.name}: not used")
            elif weights[name] != file:
                notes.append(
                    f"{file}: tensor {name!r} is not used: {index.name} takes it from "
                    f"{weights[name]}"
                )
    nbytes = sum((directory / f).stat().st_size for f in files)
    return StoredFiles(tensors, nbytes, tuple(notes))
