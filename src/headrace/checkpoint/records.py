"""What an open, checked checkpoint offers: its bytes are NumPy views of a map. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from headrace.core.families.base import Family
from headrace.core.model_spec import ModelSpec


@dataclass(frozen=True)
class RawTensor:
    """One logical tensor as stored: its format, its logical shape and views of its bytes.

    ``parts`` are those of ``formats.base.PackedTensor``; two-byte floats come as uint16 bits
    (NumPy has no bfloat16), E4M3 as uint8. ``source`` names file and stored tensor, for messages.
    """

    name: str  # the canonical name, see core.families.base.Family
    format: str  # a key of core.numeric.FORMATS
    shape: tuple[int, ...]
    parts: Mapping[str, npt.NDArray[Any]]
    source: str

    @property
    def nbytes(self) -> int:
        return sum(int(p.nbytes) for p in self.parts.values())


@dataclass(frozen=True)
class TextSource:
    """Where tokenizer and chat template come from: files of a directory, or GGUF metadata."""

    tokenizer_json: Path | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat_template: str | None = None
    gguf: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers read and checked, tensor bytes mapped but not touched.

    Taking a tensor from ``tensors`` for the first time checks its block scales (``scales``).
    """

    ref: str  # what the user typed
    path: Path
    kind: str  # "safetensors" or "gguf"
    config: Mapping[str, Any]
    family: Family
    spec: ModelSpec
    tensors: Mapping[str, RawTensor]
    text: TextSource
    nbytes: int  # of all weight files
    rope_interleaved: bool = False  # q/k rows are stored for pairs (0, 1), (2, 3), ...
    notes: tuple[str, ...] = ()  # what the files hold and was not used, one sentence each
