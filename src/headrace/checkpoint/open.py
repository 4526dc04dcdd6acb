"""Open a model, whatever its container: the one door to this package."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from headrace.checkpoint.assemble import assemble
from headrace.checkpoint.gguf import GgufFile, read_gguf
from headrace.checkpoint.hub import Progress
from headrace.checkpoint.local import LocalModel, list_local
from headrace.checkpoint.names import NameMap
from headrace.checkpoint.quantization import read_quantization
from headrace.checkpoint.records import Checkpoint, RawTensor, TextSource
from headrace.checkpoint.requirements import check_tensors
from headrace.checkpoint.resolve import resolve_ref
from headrace.checkpoint.safetensors import INDEX_SUFFIX, StoredTensor, read_directory
from headrace.checkpoint.scales import CheckedTensors
from headrace.checkpoint.strict_json import read_object
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.families import family_of, family_of_gguf
from headrace.core.model_spec import ModelSpec
from headrace.core.words import counted

log = logging.getLogger(__name__)

__all__ = ["LocalModel", "list_local", "open_checkpoint", "resolve_ref"]


def open_checkpoint(
    ref: str, *, progress: Progress | None = None, repair_nan_scales: bool = False
) -> Checkpoint:
    """Find a model, check its headers and map its tensors. No tensor's bytes are read.

    Args:
        ref: what ``resolve_ref`` takes.
        progress: called with (stage, fraction): "download" where one is needed, then "open".
        repair_nan_scales: block scales that are NaN are set to zero when their tensor is taken
            (in memory; the file stays as it is) instead of refused.

    Raises:
        ModelNotFoundError, MachineError: see ``resolve_ref``.
        CheckpointError: a file is missing, damaged or inconsistent, or does not fit its
            configuration.
        ConfigError: config.json lacks a key or has an impossible value.
        UnsupportedModelError: an architecture, format or key that is not implemented.
    """
    path = resolve_ref(ref, progress=progress)
    if progress is not None:
        progress("open", 0.0)
    if path.is_dir():
        checkpoint = _open_directory(ref, path, repair_nan_scales)
    else:
        checkpoint = _open_gguf(ref, path, repair_nan_scales)
    _report(checkpoint)
    if progress is not None:
        progress("open", 1.0)
    return checkpoint


def _report(checkpoint: Checkpoint) -> None:
    """Say what the files hold and nobody uses; ``Checkpoint.notes`` has all of it."""
    for note in checkpoint.notes:
        log.info("%s", note)
    surplus = [n for n in checkpoint.notes if INDEX_SUFFIX in n]
    if surplus:
        said = counted(len(surplus), "tensor is", "tensors are")
        log.warning("%s: %s not used: %s", checkpoint.path, said, surplus[0])


def _open_directory(ref: str, path: Path, repair: bool) -> Checkpoint:
    config = read_object(path / "config.json")
    family = family_of(config)
    quantization = read_quantization(
        config, _optional(path / "hf_quant_config.json"), str(path / "config.json")
    )
    files = read_directory(path)
    _check_layers(config.get("num_hidden_layers"), len(files.tensors), str(path / "config.json"))
    spec = family.spec(config)
    names = NameMap(family.hf_names)
    stored, notes = _without_empty(files.tensors, names)
    assembled = assemble(stored, names, quantization)
    tied = _drop_tied_head(assembled.tensors, spec)
    check_tensors(
        assembled.tensors,
        spec,
        names,
        path,
        transposed_experts=family.unquantised_experts_transposed,
    )
    return Checkpoint(
        ref=ref,
        path=path,
        kind="safetensors",
        config=config,
        family=family,
        spec=spec,
        tensors=CheckedTensors(assembled.tensors, repair=repair),
        text=_directory_text(path),
        nbytes=files.nbytes,
        notes=(*files.notes, *notes, *assembled.notes, *tied),
    )


def _optional(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.is_file() else None


def _check_layers(layers: Any, num_tensors: int, where: str) -> None:
    """Stop a damaged number before anybody makes a list of that length."""
    if isinstance(layers, int) and layers > num_tensors:
        raise CheckpointError(
            f"{where}: {counted(layers, 'layer')}, but there are only {counted(num_tensors, 'tensor')}",
            hint="the configuration and the weights belong to different models",
        )


def _without_empty(
    tensors: Mapping[str, StoredTensor], names: NameMap
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Leave out tensors without elements that no pattern knows: they carry nothing."""
    kept: dict[str, StoredTensor] = {}
    notes: list[str] = []
    for name, tensor in tensors.items():
        if tensor.data.size == 0 and names.canonical(name) is None:
            notes.append(f"{tensor.path.name}: tensor {name!r} is empty and not used")
        else:
            kept[name] = tensor
    return kept, notes


def _drop_tied_head(tensors: dict[str, RawTensor], spec: ModelSpec) -> tuple[str, ...]:
    """Where the configuration ties the output head, a stored one must be the embedding again."""
    if not spec.tie_embeddings or "lm_head" not in tensors or "embed" not in tensors:
        return ()
    head, embed = tensors["lm_head"], tensors["embed"]
    same = head.format == embed.format and head.shape == embed.shape
    if not same or not all(np.array_equal(p, embed.parts[k]) for k, p in head.parts.items()):
        raise CheckpointError(
            f"{head.source}: differs from the embedding, but tie_word_embeddings says that they "
            "are one",
            hint="set tie_word_embeddings to false in config.json if the model has a head of its "
            "own",
        )
    del tensors["lm_head"]
    return (f"{head.source}: repeats the embedding and is not used",)


def _directory_text(path: Path) -> TextSource:
    tokenizer = path / "tokenizer.json"
    config = _optional(path / "tokenizer_config.json") or {}
    template: Any = None
    if (path / "chat_template.jinja").is_file():
        try:
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path / 'chat_template.jinja'}: cannot be read: {error}",
                hint="the file is damaged: download it again",
            ) from error
    elif (path / "chat_template.json").is_file():
        template = read_object(path / "chat_template.json").get("chat_template")
    else:
        template = config.get("chat_template")
    return TextSource(
        tokenizer_json=tokenizer if tokenizer.is_file() else None,
        tokenizer_config=config,
        generation_config=_optional(path / "generation_config.json") or {},
        # A list of named templates stays in tokenizer_config, where the text side looks for it.
        chat_template=template if isinstance(template, str) else None,
    )


def _open_gguf(ref: str, path: Path, repair: bool) -> Checkpoint:
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture is None:
        raise CheckpointError(
            f"{path}: the metadata has no general.architecture",
            hint="the file is damaged, or no model (an adapter or an imatrix file)",
        )
    family = family_of_gguf(architecture)
    if family.gguf_config is None:
        raise CheckpointError(f"{path}: GGUF files of {family.name} are not read")
    _check_metadata(file, architecture)
    names = NameMap(family.gguf_names)
    tensors = _gguf_tensors(file, names)
    try:
        config = dict(family.gguf_config(file.metadata))
        # Metadata has no key for it: the file ties where it has no output matrix.
        config["tie_word_embeddings"] = "lm_head" not in tensors
        spec = family.spec(config)
    except ConfigError as error:  # the metadata is part of the file
        raise CheckpointError(f"{path}: {error.message}", hint=error.hint) from error
    check_tensors(tensors, spec, names, path)
    template = file.metadata.get("tokenizer.chat_template")
    named = any(k.startswith("tokenizer.chat_template.") for k in file.metadata)
    return Checkpoint(
        ref=ref,
        path=file.path,
        kind="gguf",
        config=config,
        family=family,
        spec=spec,
        tensors=CheckedTensors(tensors, repair=repair),
        # Several templates stay in the metadata, where the text side looks for them.
        text=TextSource(gguf=file.metadata, chat_template=None if named else template),
        nbytes=file.nbytes,
        rope_interleaved=family.gguf_rope == "interleaved",
    )


def _check_metadata(file: GgufFile, architecture: str) -> None:
    """Arrays of the architecture's own keys must hold finite numbers; layers must be possible."""
    prefix = f"{architecture}."
    for key, value in file.metadata.items():
        if key.startswith(prefix) and isinstance(value, list):
            for item in cast("list[Any]", value):
                if not isinstance(item, int | float) or not math.isfinite(item):
                    raise CheckpointError(
                        f"{file.path}: {key} holds {item!r}, expected numbers",
                        hint="the file is damaged: download it again",
                    )
    layers = file.metadata.get(prefix + "block_count")
    _check_layers(layers, len(file.tensors), f"{file.path}: {prefix}block_count")


def _gguf_tensors(file: GgufFile, names: NameMap) -> dict[str, RawTensor]:
    tensors: dict[str, RawTensor] = {}
    for name, tensor in file.tensors.items():
        ours = names.canonical(name)
        if ours is None:
            raise CheckpointError(
                f"{tensor.source}: the model has no place for this tensor",
                hint="its name or its suffix is not one of the architecture's: the file belongs "
                "to another model, or to a later version of the format",
            )
        if ours in tensors:
            raise CheckpointError(
                f"{tensor.source}: {tensors[ours].source} already holds {ours}",
                hint="the file is damaged: download it again",
            )
        tensors[ours] = RawTensor(ours, tensor.format, tensor.shape, tensor.parts, tensor.source)
    return tensors
