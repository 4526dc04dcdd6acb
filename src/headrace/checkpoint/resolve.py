"""From what a user types to a path: a directory, a GGUF file, an alias, or a hub id."""

from __future__ import annotations

from pathlib import Path

from headrace.checkpoint.aliases import ALIASES, find_alias
from headrace.checkpoint.gguf import first_parts
from headrace.checkpoint.hub import Progress, fetch, parse_reference
from headrace.checkpoint.models_folder import models_folder
from headrace.core.config_library import bundled_names
from headrace.core.errors import CheckpointError, ModelNotFoundError


def resolve_ref(ref: str, *, progress: Progress | None = None) -> Path:
    """Return the directory (with config.json and safetensors) or the .gguf file that ``ref`` means.

    Tried in this order: an existing path; an alias of ``ALIASES``; an entry of the folder that
    ``HEADRACE_MODELS`` names; a hub id ``org/name``, ``org/name/file.gguf`` or ``org/name:QUANT``.

    Raises:
        ModelNotFoundError: nothing of that name; lists the aliases and what was tried.
        CheckpointError: the path exists and is no model.
        MachineError: the hub cannot be reached.
    """
    if not ref.strip() or "\0" in ref:
        raise ModelNotFoundError(f"the model's name is {ref!r}", hint=_known())
    path = Path(ref).expanduser()
    if path.exists():
        return resolve_path(path)
    if ref in ALIASES:
        found = find_alias(ALIASES[ref])
        if found is None:
            raise ModelNotFoundError(
                f"the model {ref!r} comes with the package {ALIASES[ref].module}, which is not "
                "installed",
                hint=ALIASES[ref].install,
            )
        return found
    tried = [f"no such path as {path.absolute()}", f"no such alias ({', '.join(ALIASES)})"]
    folder = models_folder()
    if folder is not None:
        for name in (ref, f"{ref}.gguf"):
            if (folder / name).exists():
                return resolve_path(folder / name)
        tried.append(f"no such model in {folder}")
    reference = parse_reference(ref)
    # "./x", "/x" and "~/x" mean this machine, whatever the rest looks like.
    if reference is not None:
        return fetch(reference, progress)
    if ref.lower() in bundled_names():
        raise ModelNotFoundError(
            f"of {ref!r} only the configuration is here, without weights",
            hint=f"`headrace plan {ref.lower()}` plans with it; to run it name a folder with its weights, a "
            ".gguf file, or its hub id (org/name), which is downloaded",
        )
    tried.append("not a hub id (org/name)")
    raise ModelNotFoundError(f"no model {ref!r}: {'; '.join(tried)}", hint=_known())


def resolve_path(path: Path) -> Path:
    """The model that an existing path holds: itself, or the one GGUF file inside a directory.

    Raises:
        CheckpointError: no model, or several.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.name == "config.json" or path.suffix == ".safetensors":
            return resolve_path(path.parent.absolute())
        raise CheckpointError(
            f"{path} is not a .gguf file",
            hint="give a .gguf file, or a directory with config.json and .safetensors files",
        )
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return path
    files = first_parts(sorted(path.glob("*.gguf")))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF models: {', '.join(f.name for f in files)}",
            hint=f"name one: {files[0]}",
        )
    lacking = "no config.json" if not (path / "config.json").is_file() else "no .safetensors file"
    raise CheckpointError(
        f"{path} is no model: it has {lacking} and no .gguf file",
        hint="weights in other formats (.bin, .pt) are not read: convert them to safetensors",
    )


def _known() -> str:
    aliases = "; ".join(f"{a.name} ({a.about}: {a.install})" for a in ALIASES.values())
    return (
        "give a directory with config.json and .safetensors files, a .gguf file, a hub id such as "
        f"org/name, or one of the aliases: {aliases}"
    )
