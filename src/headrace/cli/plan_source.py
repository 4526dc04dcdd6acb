"""What ``headrace plan`` is given: a model by bundled name, folder or file; a machine by name or file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

from headrace.checkpoint.models_folder import models_folder
from headrace.cli.plan_rates import MAIN_RATES
from headrace.cli.reporting import note
from headrace.core.config_library import bundled_model, bundled_names
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.model_spec import ModelSpec
from headrace.core.plan_bridge import plan_spec_of
from headrace.core.plan_reading import spec_from_config
from headrace.core.plan_spec import PlanSpec
from headrace.machine.known import known_machine, parts
from headrace.machine.profile import OVERLAPPED, MachineProfile

THIS = "this"


def read_model(ref: str) -> PlanSpec:
    """A path (a folder with config.json or that file, a .gguf file or the folder of one), an alias, a name in
    the folder of models, a bundled name, or a hub id, of which config.json is read.

    Raises:
        HeadraceError: nothing of that name is here, or it cannot be read.
    """
    path = Path(ref).expanduser()
    if path.is_dir() or path.is_file() or path.suffix == ".json":
        return _read_path(path)
    from headrace.checkpoint.aliases import ALIASES

    if ref in ALIASES:
        return _read_checkpoint(ref, ref)
    folder = models_folder()
    if folder is not None:
        for name in (ref, f"{ref}.gguf"):
            if (folder / name).exists():
                return _read_path(folder / name)
    if ref.rsplit("/", 1)[-1].lower() not in bundled_names():
        from headrace.checkpoint.hub import fetch_config, parse_reference

        reference = parse_reference(ref)
        if reference is not None and reference.file is None and reference.quant is None:
            return _read_config(fetch_config(reference) / "config.json", ref.rsplit("/", 1)[-1])
    return bundled_model(ref).spec()


def _read_path(path: Path) -> PlanSpec:
    """What an existing path says: a config.json is enough, as weights may be downloaded later; but beside a
    .gguf file alone it tells what that was made from.
    """
    if path.suffix == ".json":
        return _read_config(path)
    folder = path.parent if path.suffix == ".safetensors" else path
    config = folder / "config.json"
    whole = config.is_file() and any(folder.glob("*.safetensors*"))
    if folder.is_dir() and (whole or not any(folder.glob("*.gguf"))):
        return _read_config(config)
    from headrace.checkpoint.resolve import resolve_path

    file = resolve_path(folder)
    return _read_checkpoint(str(file), file.stem)


def _read_config(file: Path, name: str = "") -> PlanSpec:
    """``name``: of the model; if not given, the file's own, or its folder's for a config.json."""
    config = _read_object(file)
    # ModelOpt's, where config.json does not say it
    quantised = file.parent / "hf_quant_config.json"
    if not config.get("quantization_config") and quantised.is_file():
        inner = _read_object(quantised).get("quantization")
        if isinstance(inner, dict):
            config["quantization_config"] = {"quant_method": "modelopt", **inner}
    whole = file.resolve()
    own = whole.parent.name if whole.name == "config.json" else whole.stem
    return spec_from_config(config, name or own)


def _read_object(file: Path) -> dict[str, Any]:
    """One of a model's JSON files.

    Raises:
        CheckpointError: it cannot be read, or holds no object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}",
            hint="a model's folder has a config.json; name that folder, or a .gguf file",
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not JSON: {error}", hint="download the file again"
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file} holds a {type(found).__name__}, not an object",
            hint=f"is this a language model's {file.name}?",
        )
    return cast("dict[str, Any]", found)


def _read_checkpoint(ref: str, name: str) -> PlanSpec:
    """Shapes from the file's metadata, bits of each kind from its tensors."""
    from headrace.checkpoint.kinds import stored_bits
    from headrace.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(ref)
    spec = ModelSpec.from_config(checkpoint.config)  # what can be opened, the engine knows
    return plan_spec_of(spec, stored_bits(checkpoint.tensors.values()), name)


def read_machine(ref: str) -> MachineProfile:
    """``this``, a name of the catalogue (parts joined by +), or a profile's JSON file.

    Raises:
        ConfigError: it is neither.
    """
    if ref == THIS:
        from headrace.cli.plan_here import this_machine

        return this_machine()
    path = Path(ref).expanduser()
    if path.suffix == ".json" or path.is_file():
        if not path.is_file():
            raise ConfigError(
                f"--machine: there is no file {ref}",
                hint="`headrace bench machine --output FILE` writes one; `--machine list` prints names",
                param="--machine",
            )
        from headrace.cli.plan_here import complete

        profile = MachineProfile.load(path)
        _note_unknown_rates(profile, ref)
        whole = complete(profile)
        _note_added_rates(profile, whole, ref)
        return whole
    return known_machine(ref)


def _note_added_rates(profile: MachineProfile, whole: MachineProfile, source: str) -> None:
    """Say which of a written file's main rates are not its own; reports tell it of a measured one."""
    if profile.origin == "measured":
        return
    added = [name for name in MAIN_RATES if name in whole.rates and name not in profile.rates]
    if added:
        note(
            f"{source} has no {', '.join(added)}: what the catalogue has for such a machine, or an estimate, "
            "is taken"
        )


# Names of rates that are in use (machine.profile lists them), without "_overlapped".
_KNOWN_RATES = re.compile(
    r"dram_read(_t\d+)?|hbm_read|pcie_(h2d|d2h|gather)|disk_read|link|cpu_experts_[a-z0-9_]+|"
    r"[gc]pu_flops_[a-z0-9_]+|kernel_\w+|graph_(launch|kernel|read)|flag_round_trip|thread_wake|"
    r"op_call|experts_host"
)


def _note_unknown_rates(profile: MachineProfile, source: str) -> None:
    """Say which rates of a file change nothing, a mistyped name for one."""
    names = {name.removesuffix(OVERLAPPED) for name in profile.rates}
    unknown = sorted(name for name in names if _KNOWN_RATES.fullmatch(name) is None)
    if unknown:
        note(f"{source}: nothing here uses the rates {', '.join(unknown)}: are they mistyped?")


def _rate(gbps: float) -> str:
    """A rate in GB/s with four digits that count, in larger units where those would need an exponent."""
    for unit, size in (("GB/s", 1e4), ("TB/s", 1e3)):
        if gbps < size:
            return f"{gbps:,.4g} {unit}"
        gbps /= 1e3
    return f"{gbps:,.4g} PB/s"


def machine_list() -> list[tuple[str, str, str, str]]:
    """(name, memory and its main rate, standing, what it is) of every part in the catalogue."""
    found: list[tuple[str, str, str, str]] = []
    for part in parts().values():
        rate = {"gpu": "hbm_read", "link": "pcie_h2d", "host": "dram_read"}[part.kind]
        memory = f"{part.memory_nbytes / 1e9:,.4g} GB, " if part.memory_nbytes else ""
        value = part.rates[rate][0]
        main = memory + _rate(value)
        found.append((part.name, main, part.standing, part.title))
    return found


def machine_records() -> list[dict[str, Any]]:
    """Every part of the catalogue for a program, with sources. Rates in the catalogue's units: GB/s, and
    TFLOP/s of arithmetic."""
    return [
        {
            "name": part.name,
            "what": part.title,
            "kind": part.kind,
            "memory_nbytes": part.memory_nbytes,
            "units": part.raw.get("sms", part.raw.get("cores")),
            "specs_source": part.specs,
            "rates": {n: {"value": v, "source": source} for n, (v, source) in part.rates.items()},
            "standing": part.standing,
        }
        for part in parts().values()
    ]
