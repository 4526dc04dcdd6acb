"""Which experts each token of a text was routed to: recorded once, replayed by planners and tests.

A file is NumPy's npz with two arrays: ``ids`` and ``meta``, the UTF-8 bytes of a JSON object (no
pickled objects, so that a trace from anywhere is safe to read).
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from headrace.core.errors import ConfigError
from headrace.core.record_json import record_from_json, record_to_json
from headrace.core.words import counted

ROUTING_TRACE_VERSION = 1


@dataclass(frozen=True)
class RoutingTraceMeta:
    """What was routed. ``text`` says which text and where it is from, ``licence`` that of the text.

    ``layers`` are the model's layer numbers of the first axis, since some layers can be dense.
    ``documents`` are the token counts of the documents that follow each other, each routed alone
    from its first token; empty where the tokens are one document.
    """

    model: Annotated[str, Meta(min_length=1)]
    text: Annotated[str, Meta(min_length=1)]
    licence: Annotated[str, Meta(min_length=1)]
    num_experts: Annotated[int, Meta(ge=1)]
    layers: tuple[Annotated[int, Meta(ge=0)], ...]
    version: int = ROUTING_TRACE_VERSION
    documents: tuple[Annotated[int, Meta(ge=1)], ...] = ()


@dataclass(frozen=True)
class RoutingTrace:
    """ids: [layers, tokens, k] int16 or int32, experts in the router's order; -1 where none."""

    ids: npt.NDArray[Any]
    meta: RoutingTraceMeta

    def save(self, path: Path) -> None:
        """Write the trace, compressed; an existing file is replaced once the new one is whole.

        Raises:
            ConfigError: ids and meta contradict each other.
        """
        _check(self, str(path))
        meta = np.frombuffer(record_to_json(self.meta).encode(), dtype=np.uint8)
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                np.savez_compressed(file, ids=self.ids, meta=meta)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> RoutingTrace:
        """Read a trace.

        Raises:
            ConfigError: not such a file, or its arrays and its meta contradict each other.
        """
        try:
            ids, text = _arrays(path)
        except _DAMAGE as error:
            raise ConfigError(
                f"{path} is not a routing trace: {error}",
                hint="a trace is an npz file with the arrays ids and meta",
            ) from None
        trace = RoutingTrace(ids, record_from_json(RoutingTraceMeta, text, f"{path}: meta"))
        _check(trace, str(path))
        return trace


# What NumPy and zipfile raise for files that are something else, cut short or damaged: a member that does not
# inflate, asks for a password or another packer, or whose header wants more memory than there is.
_DAMAGE = (
    OSError,
    KeyError,
    ValueError,
    EOFError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)

_MAGIC = (b"PK\x03\x04", b"\x93NUMPY")  # of npz and npy


def _arrays(path: Path) -> tuple[npt.NDArray[Any], bytes]:
    """ids, and meta's bytes."""
    # Of any other file NumPy says that it could be read unsafely, as a pickle.
    with path.open("rb") as file:
        if not file.read(6).startswith(_MAGIC):
            raise ValueError("it is no npz file")
    opened: Any = np.load(path, allow_pickle=False)
    if isinstance(opened, np.ndarray):
        raise ValueError("it holds one array")
    with opened as arrays:
        ids, meta = arrays["ids"], arrays["meta"]
    for name, array in (("ids", ids), ("meta", meta)):
        if not isinstance(array, np.ndarray):  # NumPy hands out what has no header as it is
            raise ValueError(f"{name} is no array")
    return ids, meta.tobytes()


def _check(trace: RoutingTrace, source: str) -> None:
    ids, meta = trace.ids, trace.meta
    if ids.dtype.name not in ("int16", "int32") or ids.ndim != 3:
        raise ConfigError(
            f"{source}: ids is {ids.dtype} with {counted(ids.ndim, 'axis', 'axes')}; expected int16 or int32 "
            "[layers, tokens, k]",
            param="ids",
        )
    if ids.shape[0] != len(meta.layers):
        raise ConfigError(
            f"{source}: ids has {counted(ids.shape[0], 'layer')}, meta.layers lists {len(meta.layers)}",
            param="layers",
        )
    if meta.documents and sum(meta.documents) != ids.shape[1]:
        raise ConfigError(
            f"{source}: meta.documents add up to {counted(sum(meta.documents), 'token')}, "
            f"ids has {ids.shape[1]}",
            param="documents",
        )
    if ids.size and not (int(ids.min()) >= -1 and int(ids.max()) < meta.num_experts):
        raise ConfigError(
            f"{source}: ids run from {ids.min()} to {ids.max()}; expected -1 to "
            f"{meta.num_experts - 1} (meta.num_experts is {meta.num_experts})",
            param="ids",
        )
