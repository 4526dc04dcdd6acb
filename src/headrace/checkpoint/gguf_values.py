"""GGUF metadata: a bounded reader of its values, and which types the keys we use must have.

The ``gguf`` package's reader is not used on files: it trusts the counts and lengths that a header
claims (memory for a million dimensions, strings of a gigabyte), and it needs 5.3 s for a vocabulary
of 49,152 tokens (2 cores of a Zen 3, 2026-11) where this one needs 0.1 s.

Source: the GGUF specification (ggml, docs/gguf.md). All numbers are little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.mapped import MappedFile
from headrace.core.errors import CheckpointError
from headrace.core.words import counted

BOOL, STRING, ARRAY = 7, 8, 9
_SCALARS: dict[int, tuple[str, str]] = {  # type id -> name, NumPy dtype
    0: ("UINT8", "<u1"),
    1: ("INT8", "<i1"),
    2: ("UINT16", "<u2"),
    3: ("INT16", "<i2"),
    4: ("UINT32", "<u4"),
    5: ("INT32", "<i4"),
    6: ("FLOAT32", "<f4"),
    BOOL: ("BOOL", "<u1"),
    10: ("UINT64", "<u8"),
    11: ("INT64", "<i8"),
    12: ("FLOAT64", "<f8"),
}
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})

# What a key must hold where code after us relies on it: scalar types, or an array's element types.
_TYPES: dict[str, frozenset[int]] = {
    "general.architecture": frozenset({STRING}),
    "general.alignment": frozenset({4}),
    "general.file_type": _INTEGERS,
    "split.no": _INTEGERS,
    "split.count": _INTEGERS,
    "split.tensors.count": _INTEGERS,
    "tokenizer.ggml.model": frozenset({STRING}),
    "tokenizer.ggml.pre": frozenset({STRING}),
    "tokenizer.chat_template": frozenset({STRING}),
    "tokenizer.ggml.bos_token_id": _INTEGERS,
    "tokenizer.ggml.eos_token_id": _INTEGERS,
    "tokenizer.ggml.add_bos_token": frozenset({BOOL}),
    "tokenizer.ggml.add_eos_token": frozenset({BOOL}),
}
_ELEMENT_TYPES: dict[str, frozenset[int]] = {
    "tokenizer.ggml.tokens": frozenset({STRING}),
    "tokenizer.ggml.merges": frozenset({STRING}),
    "tokenizer.ggml.scores": frozenset({6}),
    "tokenizer.ggml.token_type": frozenset({4, 5}),
}

# Keys are at most 65,535 bytes (specification). The largest strings in use are chat templates of
# some tens of kilobytes, the largest vocabularies have 262,144 tokens and as many merges.
MAX_KEY_NBYTES = 65_535
MAX_STRING_NBYTES = 1 << 26
MAX_ELEMENTS = 1 << 24
_MAX_NESTING = 2


class Scanner:
    """Reads a GGUF header front to back; no claim of the file is believed before it is checked.

    Raises:
        CheckpointError: from every method, where the file is too short for what it claims, or a
            claim is impossible. The message names the file and what was being read.
    """

    def __init__(self, file: MappedFile) -> None:
        self.path: Path = file.path
        self.end = file.nbytes
        self.position = 0
        self._raw = file.raw
        self._elements = 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {message}",
            hint="the file is damaged or incomplete: download it again",
        )

    def take(self, nbytes: int, what: str) -> int:
        """Advance over ``nbytes`` and return where they start."""
        start, left = self.position, self.end - self.position
        if nbytes > left:
            raise self.fail(
                f"truncated: {what} needs {counted(nbytes, 'byte')} at byte {start}, the file ends after "
                f"{left}: {counted(nbytes - left, 'byte is', 'bytes are')} missing"
            )
        self.position += nbytes
        return start

    def u32(self, what: str) -> int:
        return struct.unpack_from("<I", self._raw, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return struct.unpack_from("<Q", self._raw, self.take(8, what))[0]

    def count(self, what: str, least_nbytes: int) -> int:
        """A number of items of at least ``least_nbytes`` each, which must fit what is left."""
        value = self.u64(what)
        left = self.end - self.position
        if value * least_nbytes > left:
            raise self.fail(
                f"{what} is {value}, which takes at least {counted(value * least_nbytes, 'byte')}; "
                f"{left} are left"
            )
        return value

    def string(self, what: str, limit: int = MAX_STRING_NBYTES) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} claims {counted(length, 'byte')}, at most {limit} are allowed")
        start = self.take(length, what)
        try:
            return bytes(self._raw[start : start + length]).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from error

    def metadata(self, count: int, stop_before: str | None = None) -> dict[str, Any]:
        """Read ``count`` pairs; stop before the first key that starts with ``stop_before``."""
        found: dict[str, Any] = {}
        for number in range(count):
            key = self.string(f"metadata key {number}", MAX_KEY_NBYTES)
            if stop_before is not None and key.startswith(stop_before):
                break
            if key in found:
                raise self.fail(f"metadata key {key!r} appears twice")
            found[key] = self.value(key)
        return found

    def value(self, key: str) -> Any:
        """A metadata value: bool, int, float, str, or a list of those."""
        kind = self.u32(f"the type of {key}")
        allowed = _ELEMENT_TYPES.get(key)
        if allowed is not None and kind != ARRAY:
            raise self.fail(f"{key} has type {_name(kind)}, expected an array")
        self._check_type(key, kind, _TYPES.get(key))
        return self._value(key, kind, allowed, 0)

    def _check_type(self, key: str, kind: int, allowed: frozenset[int] | None) -> None:
        if allowed is not None and kind not in allowed:
            expected = " or ".join(_name(t) for t in sorted(allowed))
            raise self.fail(f"{key} has type {_name(kind)}, expected {expected}")

    def _value(self, key: str, kind: int, allowed: frozenset[int] | None, depth: int) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            if depth == _MAX_NESTING:
                raise self.fail(f"{key} is an array nested more than {_MAX_NESTING} deep")
            return self._array(key, allowed, depth)
        return self._scalars(key, kind, 1)[0]

    def _array(self, key: str, allowed: frozenset[int] | None, depth: int) -> list[Any]:
        kind = self.u32(f"the element type of {key}")
        self._check_type(f"the array {key}", kind, allowed)
        # An empty string takes 8 bytes, an empty array 12.
        least = {STRING: 8, ARRAY: 12}.get(kind, 1)
        count = self.count(f"the number of elements of {key}", least)
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise self.fail(f"the arrays up to {key} have more than {MAX_ELEMENTS} elements")
        if kind == STRING:
            return self._strings(key, count)
        if kind == ARRAY:
            return [self._value(key, ARRAY, None, depth + 1) for _ in range(count)]
        return self._scalars(key, kind, count)

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.fail(f"{key} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind][1])
        start = self.take(count * dtype.itemsize, key)
        values = np.frombuffer(self._raw, dtype, count, start) if count else np.empty(0, dtype)
        if kind == BOOL:
            if count and int(values.max()) > 1:
                raise self.fail(f"{key} holds {int(values.max())}, expected 0 or 1 (BOOL)")
            return values.astype(bool).tolist()
        return values.tolist()

    def _strings(self, key: str, count: int) -> list[str]:
        """``string`` for whole vocabularies: the same checks in one loop."""
        raw, position, end = self._raw, self.position, self.end
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                if end - position < 8:
                    break
                (length,) = length_at(raw, position)
                if length > end - position - 8 or length > MAX_STRING_NBYTES:
                    break
                position += 8 + length
                found.append(str(raw[position - length : position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.fail(f"element {len(found)} of {key} is not UTF-8: {error}") from error
        self.position = position
        while len(found) < count:  # only where something is wrong: let ``string`` say what
            found.append(self.string(f"element {len(found)} of {key}"))
        return found


def _name(kind: int) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind][0]
    return {STRING: "STRING", ARRAY: "ARRAY"}.get(kind, f"{kind} (unknown)")
