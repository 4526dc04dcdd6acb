"""Residual directions on disk, by the hash of the weights that they were measured on."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.core.errors import CheckpointError
from headrace.core.kv_formats import MAX_RANK
from headrace.core.model_spec import ModelSpec

_VERSION = 1
_KEY_LENGTH = 16


@dataclass(frozen=True)
class Directions:
    """directions: float32 [layers, Hkv, R, D]; key: a hash of them, for the prefix cache."""

    directions: torch.Tensor
    key: str


def data_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where Headrace keeps what it has worked out: $XDG_DATA_HOME/headrace or its default."""
    env = os.environ if env is None else env
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "headrace"


def directions_path(weights: str, env: Mapping[str, str] | None = None) -> Path:
    """The file of the weights whose hash is ``weights``."""
    return data_dir(env) / "kv-directions" / f"{weights}.npz"


def save_directions(
    weights: str,
    directions: torch.Tensor,
    about: Mapping[str, object],
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write float32 [layers, Hkv, R, D] and what they were measured on; replace what was there."""
    path = directions_path(weights, env)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = json.dumps({"version": _VERSION, "weights": weights, **about})
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, directions=directions.numpy(), note=np.array(note))
    partial.replace(path)  # readers never see half a file
    return path


def load_directions(
    weights: str, spec: ModelSpec, env: Mapping[str, str] | None = None
) -> Directions | None:
    """Read the directions of these weights; None if they were never measured.

    Raises:
        CheckpointError: the file is damaged, or does not fit the model.
    """
    path = directions_path(weights, env)
    if not path.is_file():
        return None
    expected = (spec.num_layers, spec.num_kv_heads, MAX_RANK, spec.head_dim)
    hint = "measure them again with `headrace calibrate`, or remove the file"
    try:
        # Opened here, because NumPy leaves a file open that turns out to be no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as parts:
            found = parts["directions"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint=hint) from error
    if found.shape != expected or found.dtype != np.float32 or not np.isfinite(found).all():
        raise CheckpointError(
            f"{path}: directions are {found.dtype} {list(found.shape)}, expected finite float32 "
            f"{list(expected)}",
            hint=hint,
        )
    key = hashlib.sha256(found.tobytes()).hexdigest()[:_KEY_LENGTH]
    return Directions(torch.from_numpy(found), key)  # pyright: ignore[reportUnknownMemberType]
