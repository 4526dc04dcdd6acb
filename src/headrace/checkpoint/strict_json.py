"""JSON files that others wrote: parsed with every way to be wrong turned into one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from headrace.core.errors import CheckpointError
from headrace.core.words import counted

# Far above any real file: the largest index of a published model is under 10 MB, the largest
# tokenizer_config.json under 5 MB.
MAX_NBYTES = 256 << 20


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; ``where`` names it in messages.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, duplicate keys, or not an object.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON: {error}", hint="the file is damaged: download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds {type(value).__name__}, expected a JSON object",
            hint="the file is damaged: download it again",
        )
    return cast("dict[str, Any]", value)


def read_object(path: Path) -> dict[str, Any]:
    """Read and parse a JSON file that holds an object.

    Raises:
        CheckpointError: unreadable, too large, or not a JSON object.
    """
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_NBYTES:
            raise CheckpointError(
                f"{path} has {counted(nbytes, 'byte')}, at most {MAX_NBYTES} are expected",
                hint="this is not the file that its name says",
            )
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror or error}",
            hint="check that the file exists and that you may read it",
        ) from error
