"""``quantization_config`` to what each module of a checkpoint is stored in, as far as bytes go.

A scheme has a default for matrices between embedding and head, modules that are named otherwise, and modules
that are left out. Formats that have no kernels here have their bits only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.core.plan_fields import HINT, Config

# Where modules that are left out are listed: transformers, compressed-tensors, ModelOpt, bitsandbytes.
LEFT_OUT = (
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "llm_int8_skip_modules",
)
_KNOWN = (
    "known: mxfp4, fp8, gptq, awq, bitsandbytes, and FP8, NVFP4 or whole numbers by modelopt or "
    "compressed-tensors; or plan the .gguf file"
)
DEFAULT_GROUP = 128  # of GPTQ and AWQ, where a configuration leaves it out (transformers 5.24)
SCALE_BITS = 16  # of a group of whole numbers: bfloat16 or float16
_GPTQ = ("gptq", "awq", "auto-round", "auto_round")
# bitsandbytes: float32 for each 64 weights; quantised again, a byte for each 64, a float32 for 256 of those.
_NF4, _NF4_DOUBLE = 4 + 32 / 64, 4 + 8 / 64 + 32 / (64 * 256)


@dataclass(frozen=True)
class Stored:
    """How a module is stored. ``name``: of ``core.numeric``, empty for what has no kernels here."""

    name: str
    bits: float

    @staticmethod
    def of(name: str) -> Stored:
        return Stored(name, FORMATS[name].bits_per_weight)


FP8, NVFP4, MXFP4 = (Stored.of(name) for name in ("fp8_e4m3", "nvfp4", "mxfp4"))


@dataclass(frozen=True)
class Modules:
    """A set of modules: names or parts of them, names with wild cards, regular expressions."""

    plain: frozenset[str] = frozenset()
    wild: tuple[str, ...] = ()
    expressions: tuple[re.Pattern[str], ...] = ()

    @staticmethod
    def of(patterns: Iterable[str]) -> Modules:
        """Patterns as checkpoints write them: ``re:`` stands before a regular expression.

        Raises:
            ConfigError: an expression is none.
        """
        names = set(patterns)
        expressions = {name for name in names if name.startswith("re:")}
        wild = {name for name in names - expressions if "*" in name or "?" in name}
        return Modules(
            frozenset(names - expressions - wild),
            tuple(sorted(wild)),
            tuple(_expression(name.removeprefix("re:")) for name in sorted(expressions)),
        )

    def __bool__(self) -> bool:
        return bool(self.plain or self.wild or self.expressions)

    def has(self, name: str) -> bool:
        """Whether the module of this full name, or one that it is inside of, is among them."""
        if self.plain:
            parts = name.split(".")
            count = len(parts)
            inside = (".".join(parts[i:j]) for i in range(count) for j in range(i + 1, count + 1))
            if any(part in self.plain for part in inside):
                return True
        return any(fnmatchcase(name, pattern) for pattern in self.wild) or any(
            expression.match(name) for expression in self.expressions
        )


@dataclass(frozen=True)
class Scheme:
    """``left_out`` comes before ``kinds`` (of weights), that before ``named``, that before ``default``.

    head: whether the output head is stored as these say: not at all, if it is named, or as any matrix
    """

    default: Stored | None = None
    named: tuple[tuple[Modules, Stored], ...] = ()
    left_out: Modules = field(default_factory=Modules)
    kinds: Mapping[str, Stored] = field(default_factory=dict[str, Stored])
    tables: bool = False  # embedding and output head are stored as the default, too
    head: Literal["no", "named", "as any"] = "no"

    def of(self, kind: str, names: Iterable[str], plain: Stored) -> Stored:
        """How the module is stored that has one of these names; ``plain``: what is not quantised."""
        names = tuple(names)
        if any(self.left_out.has(name) for name in names):
            return plain
        if kind in self.kinds:
            return self.kinds[kind]
        for modules, stored in self.named:
            if any(modules.has(name) for name in names):
                return stored
        return self.default or plain

    def of_head(self, names: Iterable[str], plain: Stored) -> Stored:
        """How the output head is stored."""
        if self.head == "no":
            return plain
        covers = self if self.head == "as any" else replace(self, default=None)
        return covers.of("lm_head", names, plain)


def scheme_of(config: Config, quantised: Config) -> Scheme:
    """The scheme that a ``quantization_config`` describes, or MLX's ``quantization``, which has no method.

    Raises:
        ConfigError: it has a value that cannot be.
        UnsupportedModelError: its bytes are not known here.
    """
    method = str(quantised.get("quant_method", "")).lower()
    left_out = Modules.of(_left_out(quantised))
    if method == "mxfp4":
        return Scheme(left_out=left_out, kinds={"experts": MXFP4})
    if not method and "bits" in quantised and "group_size" in quantised:
        return _mlx(quantised)
    kinds: dict[str, Stored] = {}
    if "fp4" in str(config.get("expert_dtype") or quantised.get("expert_dtype") or "").lower():
        kinds["experts"] = MXFP4
    default, named = _linear(method, quantised)
    if default is None and not named:
        raise UnsupportedModelError(
            f"quantization_config.quant_method is {method!r}, whose bytes are not known here",
            hint=_KNOWN,
        )
    head = "named"
    if method in _GPTQ:  # whose exceptions are of what is quantised at all
        head = "as any" if quantised.get("lm_head") is True else "no"
    return Scheme(default, named, left_out, kinds, head=head)


_Named = tuple[tuple[Modules, Stored], ...]


def _linear(method: str, quantised: Config) -> tuple[Stored | None, _Named]:
    """What matrices are stored in, and those that are stored otherwise."""
    if method in ("fp8", "fbgemm_fp8"):
        return FP8, ()
    if method in _GPTQ:
        return _grouped(quantised), _dynamic(quantised)
    if method == "bitsandbytes":
        return _bitsandbytes(quantised), ()
    groups = quantised.get("config_groups")
    if method == "modelopt" and str(quantised.get("quant_algo")) != "MIXED_PRECISION":
        algorithm = quantised.get("quant_algo")
        if algorithm is not None or not isinstance(groups, Mapping):
            return _algorithm(quantised), ()
    if method == "modelopt" and isinstance(quantised.get("quantized_layers"), Mapping):
        return None, _by_layer(cast("Config", quantised["quantized_layers"]))
    if method not in ("modelopt", "compressed-tensors"):
        return None, ()
    if isinstance(groups, Mapping) and groups:
        return _by_group(cast("Config", groups), quantised)
    formats = {"float-quantized": FP8, "naive-quantized": FP8, "nvfp4-pack-quantized": NVFP4}
    return formats.get(str(quantised.get("format"))), ()


def _mlx(quantised: Config) -> Scheme:
    """MLX: all matrices, tables too; modules may have numbers of their own, or be left out."""
    named: list[tuple[Modules, Stored]] = []
    plain: list[str] = []
    for name, own in quantised.items():
        if isinstance(own, Mapping):
            values: Config = {**quantised, **cast("Config", own)}
            named.append((Modules.of([name]), _mlx_stored(values)))
        elif own is False:
            plain.append(name)
    default, left_out = _mlx_stored(quantised), Modules.of(plain)
    return Scheme(default, tuple(named), left_out, tables=True, head="as any")


def _mlx_stored(values: Config) -> Stored:
    known = {"mxfp4": MXFP4, "nvfp4": NVFP4, "mxfp8": Stored("", 8.25)}
    mode = str(values.get("mode") or "affine")
    if mode in known:
        return known[mode]
    group = values.get("group_size")
    stored = _whole(values.get("bits"), group, zero_points=False)
    # beside the scale a bias of the same type
    more = SCALE_BITS / group if isinstance(group, int) and group > 0 else 0.0
    return Stored("", stored.bits + more)


def _left_out(quantised: Config) -> list[str]:
    found: list[str] = []
    for key in LEFT_OUT:
        names = quantised.get(key)
        if isinstance(names, list):
            found += [str(name) for name in cast("list[object]", names)]
    dynamic = quantised.get("dynamic")
    if isinstance(dynamic, Mapping):  # GPTQModel
        found += [f"re:{n[2:]}" for n in cast("Mapping[str, Any]", dynamic) if n.startswith("-:")]
    return found


def _algorithm(quantised: Config) -> Stored | None:
    """ModelOpt's ``quant_algo``."""
    name = str(quantised.get("quant_algo", "")).upper()
    if name.startswith("FP8"):
        return FP8
    if name.startswith("NVFP4") or (not name and "nvfp4" in str(quantised).lower()):
        return NVFP4
    if name.startswith(("W4A16", "W4A8")):
        return _whole(4, quantised.get("group_size"), zero_points=False)
    return None


def _by_layer(layers: Config) -> _Named:
    """ModelOpt's ``quantized_layers``: an algorithm for each module."""
    names: dict[Stored, list[str]] = {}
    for name, entry in layers.items():
        stored = _algorithm(cast("Config", entry)) if isinstance(entry, Mapping) else None
        if stored is None:
            raise UnsupportedModelError(
                f"quantization_config.quantized_layers[{name!r}] is {entry!r}, whose bytes are not known "
                "here",
                hint=_KNOWN,
            )
        names.setdefault(stored, []).append(str(name))
    return tuple((Modules.of(each), stored) for stored, each in names.items())


def _by_group(groups: Config, quantised: Config) -> tuple[Stored | None, _Named]:
    """compressed-tensors: groups of modules that are stored alike; names come before classes."""
    default: Stored | None = None
    named: list[tuple[Modules, Stored]] = []
    for name, entry in groups.items():
        group: Config = cast("Config", entry) if isinstance(entry, Mapping) else {}
        weights = group.get("weights")
        form = str(group.get("format") or quantised.get("format") or "")
        stored = None
        if isinstance(weights, Mapping) and "24" not in form and "sparse" not in form:
            stored = _weights(cast("Config", weights))
        if stored is None:
            raise UnsupportedModelError(
                f"quantization_config.config_groups[{name!r}]: weights are {weights!r}"
                + (f" in format {form!r}" if form else "")
                + ", whose bytes are not known here",
                hint=_KNOWN,
            )
        targets = group.get("targets")
        wanted = (
            [str(t) for t in cast("list[object]", targets)] if isinstance(targets, list) else []
        )
        if "Linear" in wanted or not wanted:
            default = stored
        if others := [t for t in wanted if t != "Linear"]:
            named.append((Modules.of(others), stored))
    return default, tuple(named)


def _weights(weights: Config) -> Stored | None:
    """One group's ``weights``."""
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") == "float":
        if bits == 4:
            return {"16": NVFP4, "32": MXFP4}.get(str(group))
        return FP8 if bits == 8 else None
    if weights.get("type", "int") != "int":
        return None
    return _whole(bits, group, zero_points=weights.get("symmetric") is False)


def _grouped(quantised: Config) -> Stored:
    """GPTQ and AWQ: codes, and for each group of weights a scale and a zero point."""
    group = quantised.get("group_size", quantised.get("q_group_size", DEFAULT_GROUP))
    return _whole(quantised.get("bits", quantised.get("w_bit")), group, zero_points=True)


def _dynamic(quantised: Config) -> _Named:
    """GPTQModel's ``dynamic``: modules with values of their own (``+:`` before an expression, or none)."""
    dynamic = quantised.get("dynamic")
    found: list[tuple[Modules, Stored]] = []
    if isinstance(dynamic, Mapping):
        for name, own in cast("Mapping[str, Any]", dynamic).items():
            if not name.startswith("-:") and isinstance(own, Mapping):
                stored = _grouped({**quantised, **cast("Config", own)})
                found.append((Modules.of([f"re:{name.removeprefix('+:')}"]), stored))
    return tuple(found)


def _bitsandbytes(quantised: Config) -> Stored | None:
    if quantised.get("load_in_4bit") or quantised.get("_load_in_4bit"):
        return Stored("", _NF4_DOUBLE if quantised.get("bnb_4bit_use_double_quant") else _NF4)
    if quantised.get("load_in_8bit") or quantised.get("_load_in_8bit"):
        return Stored("", 8.0)
    return None


def _whole(bits: object, group: object, *, zero_points: bool) -> Stored:
    """Whole numbers of so many bits with a scale, and perhaps a zero point, for each ``group`` of them.

    ``group`` below 1 or None: one for each row, which hardly counts.
    """
    for name, value, fine in (
        ("bits", bits, isinstance(bits, int) and 1 <= bits <= 16),
        ("group_size", group, group is None or isinstance(group, int)),
    ):
        if not fine or isinstance(value, bool):
            raise ConfigError(
                f"config.json: quantization_config has {value!r} for {name}; it must be a whole number",
                hint=HINT,
                param="quantization_config",
            )
    number, each = cast("int", bits), cast("int | None", group) or 0
    scales = (SCALE_BITS + (number if zero_points else 0)) / each if each > 0 else 0.0
    return Stored("", number + scales)


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"config.json: quantization_config has {text!r}, which is no regular expression: {error}",
            hint=HINT,
            param="quantization_config",
        ) from None
