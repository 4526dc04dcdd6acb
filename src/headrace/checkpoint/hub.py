"""Downloads from the Hugging Face hub, through its own library: resume, cache, offline mode."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint.hub_cache import cache_folder, find_snapshot
from headrace.core.errors import MachineError, ModelNotFoundError

Progress = Callable[[str, float], None]

_REFERENCE = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?P<file>[^\0]+\.gguf)|:(?P<quant>[\w.-]+))?"
)
# What a Hugging Face directory needs. Folders below (original/, metal/, onnx/) repeat the weights.
_DIRECTORY_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_CONFIGURATION = ("config.json", "hf_quant_config.json")
# As long as the library waits for a file's properties by default.
_TIMEOUT_S = 10
_SPLIT_NUMBER = re.compile(r"-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf$")


@dataclass(frozen=True)
class HubReference:
    """``org/name``, ``org/name/path/file.gguf`` or ``org/name:QUANT``."""

    repo: str
    file: str | None = None
    quant: str | None = None


def parse_reference(ref: str) -> HubReference | None:
    """Read a hub reference; None where ``ref`` does not look like one."""
    match = _REFERENCE.fullmatch(ref)
    if match is None or ".." in ref:
        return None
    return HubReference(match["repo"], match["file"], match["quant"])


def fetch(reference: HubReference, progress: Progress | None = None) -> Path:
    """Download what is missing of a model and return its directory or its (first) GGUF file.

    Interrupted downloads resume; with ``HF_HUB_OFFLINE`` set, or no network, the cache answers.

    Raises:
        ModelNotFoundError: no such repository or file, or several GGUF files to choose from.
        MachineError: the model is not in the cache and the hub cannot be reached.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    offline_files = _cached_files(reference.repo)
    try:
        # list_repo_files would retry for 23 s where there is no network; this fails at once.
        info = hub.HfApi().model_info(reference.repo, timeout=_TIMEOUT_S)
        files = [str(s.rfilename) for s in info.siblings or ()]
        online = True
    except Exception as error:  # the library raises its own, its HTTP library's, and OSError
        if offline_files is None:
            raise _failure(reference, error) from error
        files, online = offline_files, False
    wanted = choose_files(reference, files)
    gguf = wanted[0] if wanted[0].endswith(".gguf") else None
    folder = find_snapshot(reference.repo, cache_folder())
    if online:
        kwargs: dict[str, Any] = {} if progress is None else {"tqdm_class": _bar(progress)}
        try:
            folder = Path(
                hub.snapshot_download(
                    reference.repo, allow_patterns=[_literal(f) for f in wanted], **kwargs
                )
            )
        except Exception as error:
            raise _failure(reference, error) from error
    if folder is None:  # pragma: no cover - the cache was emptied a moment ago
        raise ModelNotFoundError(f"{reference.repo} has disappeared from the cache")
    return folder if gguf is None else folder / gguf


def fetch_config(reference: HubReference) -> Path:
    """The directory of a model's configuration: from the cache, or downloaded without any weights.

    Raises:
        ModelNotFoundError: no such repository, or it has no config.json.
        MachineError: it is not in the cache and the hub cannot be reached.
    """
    folder = find_snapshot(reference.repo, cache_folder())
    if folder is None or not (folder / "config.json").is_file():
        hub: Any = importlib.import_module("huggingface_hub")
        try:
            folder = Path(
                hub.snapshot_download(reference.repo, allow_patterns=list(_CONFIGURATION))
            )
        except Exception as error:  # as in ``fetch``
            raise _failure(reference, error) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{reference.repo} has no config.json",
            hint="download its .gguf file and name that: sizes are in its metadata",
        )
    return folder


def choose_files(reference: HubReference, files: Sequence[str]) -> list[str]:
    """Which files of a repository make up the model; a GGUF's first part comes first.

    Raises:
        ModelNotFoundError: nothing fits, or more than one GGUF file does.
    """
    ggufs = sorted(f for f in files if f.endswith(".gguf"))
    if reference.file is None and reference.quant is None:
        safetensors = [f for f in files if "/" not in f and f.endswith(".safetensors")]
        if safetensors and "config.json" in files:
            return sorted(f for f in files if "/" not in f and _is_directory_file(f))
    chosen = [f for f in ggufs if reference.file in (None, f)]
    if reference.quant is not None:
        chosen = [f for f in ggufs if _has_quant(f, reference.quant)]
    models = sorted({_SPLIT_NUMBER.sub("", f) for f in chosen})
    if len(models) == 1:
        if reference.file is not None:
            chosen = [f for f in ggufs if _SPLIT_NUMBER.sub("", f) == models[0]]
        return chosen
    what = reference.file or (f"GGUF file for {reference.quant}" if reference.quant else "weights")
    if not models:
        offered = ", ".join(ggufs) or "no .gguf files"
        raise ModelNotFoundError(
            f"{reference.repo} has no {what} that can be read",
            hint=f"the repository offers {offered}; weights are read from .safetensors with "
            "config.json, or from .gguf",
        )
    raise ModelNotFoundError(
        f"{reference.repo} holds {len(models)} GGUF models: {', '.join(models)}",
        hint=f"name one: {reference.repo}/{chosen[0]}",
    )


def _is_directory_file(name: str) -> bool:
    return any(
        name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:]))
        for pattern in _DIRECTORY_FILES
    )


def _has_quant(file: str, quant: str) -> bool:
    """Whether a file name contains ``quant`` between separators: Q4_K does not find Q4_K_M."""
    pattern = rf"(?:^|[-./]){re.escape(quant)}(?:$|[-./])"
    return re.search(pattern, file, flags=re.IGNORECASE) is not None


def _literal(name: str) -> str:
    """A file name as an fnmatch pattern that fits only itself."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _cached_files(repo: str) -> list[str] | None:
    folder = find_snapshot(repo, cache_folder())
    if folder is None:
        return None
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def _failure(reference: HubReference, error: Exception) -> ModelNotFoundError | MachineError:
    """What went wrong, in words; the classes are matched by name over the library's versions."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    causes = kinds | {c.__name__ for c in type(error.__cause__).__mro__}
    repo = reference.repo
    local = "or give a local directory or .gguf file instead of the hub's id"
    if "GatedRepoError" in kinds:
        return ModelNotFoundError(
            f"{repo} is gated: its licence has to be accepted on the hub",
            hint=f"accept it there and log in with `hf auth login`, {local}",
        )
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}:
        return ModelNotFoundError(
            f"the hub has no model {repo!r}, or it is private; and no file or directory here has "
            "that name",
            hint=f"check the spelling, log in with `hf auth login`, {local}",
        )
    if "OfflineModeIsEnabled" in causes:
        return MachineError(
            f"{repo} is not in the cache ({cache_folder()}), and HF_HUB_OFFLINE is set",
            hint=f"unset HF_HUB_OFFLINE to download it, {local}",
        )
    text = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
    return MachineError(
        f"{repo} cannot be fetched from the hub: {detail}",
        hint=f"check the network and try again (finished parts are kept), {local}",
    )


def _bar(progress: Progress) -> type[Any]:
    """A progress bar class for the hub's library that reports to ``progress`` and draws nothing.

    The library counts bytes in one bar and files in another: bytes win where both exist.
    """
    from tqdm.auto import tqdm

    class _Nowhere:
        def write(self, text: str) -> None:
            del text

        def flush(self) -> None:
            return None

    class _Bar(tqdm):
        counts_bytes = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["file"] = _Nowhere()
            kwargs.pop("name", None)  # the library's own bar takes it
            super().__init__(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            in_bytes = self.unit == "B"
            if in_bytes or not _Bar.counts_bytes:
                _Bar.counts_bytes = in_bytes
                if self.total:
                    progress("download", min(1.0, self.n / self.total))
            return shown

    return _Bar
