"""Measures a model's residual directions and stores them (``headrace calibrate``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.fingerprint import weights_hash
from headrace.checkpoint.open import open_checkpoint
from headrace.core.errors import UserError
from headrace.core.kv_formats import MAX_RANK
from headrace.core.words import counted
from headrace.kv.directions import save_directions
from headrace.machine.device import HostDevice
from headrace.models.calibration import LONGEST, calibration_text, directions, query_moments
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops.registry import OpSet, resolve
from headrace.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Calibrated:
    """What was stored where. energy: the share of E|q|^2 along the directions, mean over heads."""

    path: Path
    num_tokens: int
    num_heads: int
    energy: float


def calibrate(
    ref: str,
    text: str | None = None,
    *,
    min_tokens: int,
    max_tokens: int,
    progress: Callable[[str, float], None] | None = None,
) -> Calibrated:
    """Measure a model's residual directions and store them by the hash of its weights.

    Args:
        ref: what ``headrace run`` takes.
        text: to measure on; the built-in one if None.
        min_tokens, max_tokens: a shorter text is refused, a longer one cut.

    Raises:
        UserError: the text is too short.
        HeadraceError: the model cannot be loaded.
    """
    checkpoint = open_checkpoint(ref, progress=progress)
    ids = load_tokenizer(checkpoint.text).encode(calibration_text() if text is None else text)
    ids = ids[: min(max_tokens, checkpoint.spec.max_context)]
    if len(ids) < min_tokens:
        raise UserError(
            f"the text has {counted(len(ids), 'token')}, at least {min_tokens} are needed",
            hint="give a longer --text, or leave it out",
        )
    device = HostDevice()
    places = min(checkpoint.spec.max_context, LONGEST)

    def load(ops: OpSet) -> Decoder:
        return load_model(checkpoint, ops, device, max_positions=places, progress=progress)

    moments = query_moments(load, resolve(("cpu", "reference")), ids, progress)
    found = directions(moments, MAX_RANK)
    kept = (found.double() @ moments * found.double()).sum((-2, -1))
    total = moments.diagonal(dim1=-2, dim2=-1).sum(-1)
    source = "built-in" if text is None else hashlib.sha256(text.encode()).hexdigest()
    path = save_directions(
        weights_hash(checkpoint), found, {"model": ref, "text": source, "num_tokens": len(ids)}
    )
    return Calibrated(path, len(ids), total.numel(), float((kept / total).mean()))
