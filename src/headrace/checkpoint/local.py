"""The models on this machine: aliases, the hub's cache and the user's own folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.checkpoint.aliases import ALIASES, find_alias
from headrace.checkpoint.gguf import first_parts, read_summary, split_paths
from headrace.checkpoint.hub_cache import cache_folder, cached_repositories
from headrace.checkpoint.models_folder import MODELS_VARIABLE, models_folder
from headrace.checkpoint.strict_json import read_object
from headrace.core.errors import ConfigError, HeadraceError

# general.file_type: what most tensors are stored in (the GGUF specification's enumeration).
_FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4",
}


@dataclass(frozen=True)
class LocalModel:
    """A model that is here: what to type for it, where it is, and what its header says."""

    name: str
    path: str
    architecture: str
    format: str
    nbytes: int  # of its weight files


def list_local() -> list[LocalModel]:
    """Find the models on this machine. Reads configurations and the fronts of headers only.

    A file that cannot be read is listed with what is wrong as its format.

    Raises:
        ConfigError: ``HEADRACE_MODELS`` names something that is no folder.
    """
    found: list[LocalModel] = []
    for alias in ALIASES.values():
        try:
            path = find_alias(alias)
        except HeadraceError:
            continue  # running it says what is wrong with the package
        if path is not None:
            found.append(_describe(alias.name, path))
    for repo, snapshot in cached_repositories(cache_folder()):
        found.extend(_in_folder(repo, snapshot, named=repo))
    folder = models_folder()
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"{MODELS_VARIABLE} is {str(folder)!r}, which is no folder",
            hint=f"unset {MODELS_VARIABLE}, or name the folder that holds your models",
        )
    if folder is not None:
        found.extend(_in_folder(str(folder), folder, named=None))
        for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
            found.extend(_in_folder(inner.name, inner, named=inner.name))
    return found


def _in_folder(prefix: str, folder: Path, *, named: str | None) -> Iterator[LocalModel]:
    """A Hugging Face directory, or every GGUF model in a folder."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield _describe(prefix, folder)
        return
    named_gguf = folder.rglob("*.gguf") if named else folder.glob("*.gguf")
    # A pipe or a device by such a name would block or never end.
    for file in first_parts(sorted(p for p in named_gguf if p.is_file())):
        inside = file.relative_to(folder).as_posix()
        yield _describe(f"{named}/{inside}" if named else file.name.removesuffix(".gguf"), file)


def _describe(name: str, path: Path) -> LocalModel:
    try:
        if path.is_dir():
            config = read_object(path / "config.json")
            nbytes = sum(f.stat().st_size for f in path.glob("*.safetensors"))
            return LocalModel(name, str(path), _architecture(config), _format(config), nbytes)
        summary = read_summary(path)
        count = summary.get("split.count", 1)
        parts = split_paths(path, count) if count > 1 else [path]
        kind = summary.get("general.file_type")
        return LocalModel(
            name,
            str(path),
            str(summary.get("general.architecture", "?")),
            _FILE_TYPES.get(kind, f"file type {kind}") if isinstance(kind, int) else "GGUF",
            sum(p.stat().st_size for p in parts),
        )
    except (HeadraceError, OSError) as error:
        message = error.message if isinstance(error, HeadraceError) else str(error)
        return LocalModel(name, str(path), "?", f"unreadable: {message}", 0)


def _architecture(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    if isinstance(listed, list) and listed:
        return str(cast("list[Any]", listed)[0])
    return str(config.get("model_type", "?"))


def _format(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        values = cast("Mapping[str, Any]", quantized)
        return str(values.get("quant_algo") or values.get("format") or values.get("quant_method"))
    return str(config.get("dtype") or config.get("torch_dtype") or "safetensors")
