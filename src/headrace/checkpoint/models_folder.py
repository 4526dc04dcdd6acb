"""The user's folder of models. Apart from what opens them, which needs NumPy."""

from __future__ import annotations

import os
from pathlib import Path

MODELS_VARIABLE = "HEADRACE_MODELS"


def models_folder() -> Path | None:
    """The folder of models that the environment variable ``HEADRACE_MODELS`` names."""
    given = os.environ.get(MODELS_VARIABLE)
    return Path(given).expanduser() if given else None
