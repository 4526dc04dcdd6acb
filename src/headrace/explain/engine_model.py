"""What an engine reaches of a machine's rates: the shares in ``engines.toml``, with their sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import ConfigError
from headrace.explain import leaf
from headrace.explain.cost import BYTE_RATES
from headrace.explain.step_cost import Leaf
from headrace.machine.profile import MachineProfile

FILE = Path(__file__).with_name("engines.toml")
PHASES = {leaf.ATTENTION_DECODE: "decode", leaf.ATTENTION_PREFILL: "prefill"}
# Products of many rows, which unpack each weight once for all of them.
MANY_ROWS = (leaf.QKV, leaf.O_PROJECTION, leaf.DENSE_FFN)
# Rates behind resources that are not bytes.
COMPUTE_RATES = {"tensor": "gpu_flops_bf16", "vector": "gpu_flops_f32", "cpu": "cpu_flops_f32"}
Shares = Mapping[str, float]


@dataclass(frozen=True)
class EngineModel:
    """One engine. See ``engines.toml`` for what the shares mean; ``sources``: path -> document."""

    name: str
    title: str
    overlap: Literal["both", "none"]
    policy: Literal["value", "lru"]
    split_kv: bool
    kernels_per_layer: int
    kernels_per_mixture: int
    spread: float
    reach: Shares
    kernel: Shares
    attention: Mapping[str, Shares] = field(default_factory=dict[str, Shares])
    prompts: Shares = field(default_factory=dict[str, float])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def efficiency(
        self, one: Leaf, machine: MachineProfile, *, prompt: bool = False
    ) -> dict[str, float]:
        """Share of each resource's rate that the leaf reaches on this machine.

        prompt: in a prompt's step.
        """
        shares: dict[str, float] = {}
        kernel = self.kernel
        if prompt and one.path == "cpu" and one.id in MANY_ROWS:
            kernel = {**kernel, **self.prompts}
        for resource in {*self.reach, *kernel}:
            reach = 1.0 if measured(machine, resource) else self.reach.get(resource, 1.0)
            shares[resource] = reach * kernel.get(resource, 1.0)
        if one.path == "fetch":  # the copy engine reads host memory, not the engine's kernels
            shares["dram"] = 1.0 if measured(machine, "dram") else self.reach.get("dram", 1.0)
        phase = PHASES.get(one.id, "")
        if one.path == "gpu":  # what the CPU does of a split attention has the CPU's shares
            shares.update(self.attention.get(phase, {}))
        else:
            for resource, share in self.attention.get(f"{phase}_on_cpu", {}).items():
                reach = 1.0 if measured(machine, resource) else self.reach.get(resource, 1.0)
                shares[resource] = reach * share
        gpu = machine.gpu
        if one.blocks and not self.split_kv and gpu is not None and gpu.multiprocessors:
            busy = min(1.0, one.blocks / gpu.multiprocessors)
            shares = {**shares, **{r: shares.get(r, 1.0) * busy for r in ("hbm", "tensor")}}
        return shares


def measured(machine: MachineProfile, resource: str) -> bool:
    """Whether the machine's rate of ``resource`` was measured, not taken from a data sheet."""
    rate = machine.rates.get(BYTE_RATES.get(resource) or COMPUTE_RATES.get(resource, ""))
    return machine.origin == "measured" or (
        rate is not None and rate.source.lower().startswith("measured")
    )


@cache
def engine_models() -> dict[str, EngineModel]:
    """Every engine of ``engines.toml``."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: _read(name, raw) for name, raw in table.items()}


def engine_model(name: str) -> EngineModel:
    """One engine.

    Raises:
        ConfigError: it is not in the file.
    """
    models = engine_models()
    if name not in models:
        raise ConfigError(f"engine {name!r} is not one of {', '.join(models)}", param="engine")
    return models[name]


def _read(name: str, raw: Mapping[str, Any]) -> EngineModel:
    sources: dict[str, str] = {}

    def shares(path: str, table: Mapping[str, Any]) -> dict[str, float]:
        for resource, (_, source) in table.items():
            sources[f"{path}.{resource}"] = source
        return {resource: float(value) for resource, (value, _) in table.items()}

    attention = {p: shares(f"attention.{p}", t) for p, t in raw.get("attention", {}).items()}
    return EngineModel(
        name=name,
        title=raw["title"],
        overlap=raw["overlap"],
        policy=raw["policy"],
        split_kv=raw["split_kv"],
        kernels_per_layer=raw["kernels_per_layer"],
        kernels_per_mixture=raw["kernels_per_mixture"],
        spread=raw["spread"],
        reach=shares("reach", raw.get("reach", {})),
        kernel=shares("kernel", raw.get("kernel", {})),
        attention=attention,
        prompts=shares("prompts", raw.get("prompts", {})),
        sources=sources,
    )
