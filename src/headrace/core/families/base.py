"""The record that describes a family, and the look-up by configuration."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from headrace.core.errors import UnsupportedModelError
from headrace.core.model_spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """One family of architectures.

    ``hf_names`` and ``gguf_names`` map stored names to canonical ones; ``{i}`` stands for the
    layer, ``{e}`` for the expert. The canonical names, all optional but the first two: ``embed``,
    ``final_norm``, ``lm_head`` and, under ``layers.{i}.``: ``attn_norm``, ``q``, ``k``, ``v``,
    ``o``, ``q_bias``, ``k_bias``, ``v_bias``, ``o_bias``, ``q_norm``, ``k_norm``, ``sinks``,
    ``attn_post_norm``, ``ffn_norm``, ``ffn_post_norm``, ``gate``, ``up``, ``down``, ``router``,
    ``router_bias``, ``experts.gate``, ``experts.up``, ``experts.down``, ``experts.gate_bias``,
    ``experts.up_bias``, ``experts.down_bias``, ``experts.gate_up``, ``experts.gate_up_bias``
    (stacked, experts first), or ``experts.{e}.gate`` and so on where a checkpoint stores them one by one.
    ``rope_freqs`` holds divisors of RoPE's frequencies (GGUF); ``layers.{i}.rope_inv_freq`` is what
    theta already gives, and is not loaded.

    ``gguf_config`` says ``tie_word_embeddings: true``, since metadata does not tell: the reader of
    the file sets it to false where ``output.weight`` exists.
    """

    name: str  # config.json's model_type
    hf_architectures: tuple[str, ...]
    spec: Callable[[Mapping[str, Any]], ModelSpec]
    hf_names: Mapping[str, str]
    gguf_architecture: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict[str, str])
    gguf_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None  # metadata -> config
    gguf_rope: Literal["halves", "interleaved"] = "halves"  # how stored q/k rows pair up for RoPE
    # What safetensors' norm weights lack: Gemma multiplies by 1 + w, and GGUF stores the sum.
    hf_norm_offset: float = 0.0
    # Stacked experts in float32, float16 or bfloat16 are stored [experts, in, out] (safetensors).
    unquantised_experts_transposed: bool = False


# Modules of this package that several families share.
_SHARED = ("base", "reading", "naming", "gguf_keys")


@cache
def families() -> dict[str, Family]:
    """Every family, by name: the ``FAMILY`` record of each module in this package."""
    import headrace.core.families as package

    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name in _SHARED:
            continue
        family: Family = importlib.import_module(f"headrace.core.families.{info.name}").FAMILY
        found[family.name] = family
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that reads ``config``, by ``architectures`` first, then ``model_type``."""
    wanted = [str(a) for a in config.get("architectures") or ()]
    for family in families().values():
        if any(a in family.hf_architectures for a in wanted):
            return family
    if not wanted and config.get("model_type") in families():
        return families()[str(config["model_type"])]
    known = ", ".join(sorted(a for f in families().values() for a in f.hf_architectures))
    raise UnsupportedModelError(
        f"architecture {', '.join(wanted) or config.get('model_type')!r} is not implemented",
        hint=f"supported: {known}",
    )


def family_of_gguf(architecture: str) -> Family:
    """Return the family of a GGUF file's ``general.architecture``."""
    for family in families().values():
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(
        sorted(f.gguf_architecture for f in families().values() if f.gguf_architecture)
    )
    raise UnsupportedModelError(
        f"GGUF architecture {architecture!r} is not implemented", hint=f"supported: {known}"
    )
