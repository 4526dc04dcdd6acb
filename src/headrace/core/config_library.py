"""The bundled configurations of well-known open models: names to ``PlanSpec``.

The files in ``headrace/configs`` are config.json files (the keys that shapes follow from) with one key
more, ``headrace``: title, source, what was published about the size, and what is not verified.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelNotFoundError
from headrace.core.plan_reading import spec_from_config
from headrace.core.plan_spec import PlanSpec

FOLDER = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class BundledModel:
    """One bundled configuration. ``published``: figures to compare with, and their source."""

    name: str
    title: str
    source: str
    published: Mapping[str, Any]
    unverified: tuple[str, ...]
    config: Mapping[str, Any]

    def spec(self) -> PlanSpec:
        """The model for planning, with what is not verified as notes."""
        spec = spec_from_config(self.config, self.name)
        notes = (*spec.notes, *(f"not verified: {text}" for text in self.unverified))
        return replace(spec, notes=notes)


def bundled_names() -> list[str]:
    """Every bundled name, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def bundled_model(name: str) -> BundledModel:
    """The bundled configuration of ``name`` (any case; an organisation before a slash is ignored).

    Raises:
        ModelNotFoundError: there is none; the message names the nearest.
    """
    wanted = name.rsplit("/", 1)[-1].lower()
    names = bundled_names()
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
        raise ModelNotFoundError(
            f"no model {name!r} is bundled, and no folder or .gguf file of that name is here"
            + (f"; did you mean {' or '.join(near)}?" if near else ""),
            hint="bundled: " + ", ".join(names),
        )
    config = json.loads((FOLDER / f"{wanted}.json").read_text(encoding="utf-8"))
    about = config.pop("headrace")
    return BundledModel(
        name=wanted,
        title=about["title"],
        source=about["source"],
        published=about["published"],
        unverified=tuple(about["unverified"]),
        config=config,
    )
