"""What there is of kernels: every operation with the back-ends that have it, whether usable here or not.

For people (``headrace kernels list``); who computes asks ``ops.registry``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.core.errors import HeadraceError
from headrace.machine.device import HostDevice
from headrace.ops import registry

# What each operation of the registry does.
ABOUT: Mapping[str, str] = {
    "embed": "looks up the tokens' rows",
    "rmsnorm": "normalises each row",
    "linear": "multiplies by a matrix, and adds bias and residual",
    "linear_group": "multiplies by several matrices at once: queries, keys and values",
    "gated_linear": "multiplies by gate and up, and joins them",
    "rope": "rotates queries and keys by their positions",
    "kv_append": "writes keys and values into the cache",
    "attention_prefill": "attention of a prompt's tokens",
    "attention_decode": "attention of one token of each sequence",
    "sealed_append": "writes into a quantised cache, and seals pages that are full",
    "sealed_attention_prefill": "attention of a prompt's tokens over a quantised cache",
    "sealed_attention_decode": "attention of one token of each sequence over a quantised cache",
    "router_topk": "chooses each token's experts",
    "moe": "multiplies by the chosen experts",
    "attention_block": "a layer's attention in one call",
    "dense_block": "a layer's feed-forward in one call",
    "route": "a layer's router in one launch",
    "sample": "chooses tokens where the logits are: greedily, or drawn",
}
# What is no operation of the registry, by the back-end that has it: groups of kernels behind one door.
GROUPS: Mapping[str, tuple[str, str]] = {
    "expert_cache": ("triton", "plans, fetches and multiplies experts that a GPU keeps in slots"),
    "expert_service": ("cpu", "multiplies experts in host memory, beside a GPU"),
}
HOST_SAMPLER = "host_sampler"
HOST = "host"  # NumPy in the engine itself, on every machine


@dataclass(frozen=True)
class Entry:
    """One operation, or a group of kernels.

    backends: those that have it; cpu: the one that serves on this machine's CPU, None if none does, as where
    its parts serve instead; gpu: on its GPU; about: what it does
    """

    name: str
    backends: tuple[str, ...]
    cpu: str | None = None
    gpu: str | None = None
    about: str = ""


@dataclass(frozen=True)
class Inventory:
    """Entries, and for each back-end why it cannot be used here (None: it can)."""

    entries: tuple[Entry, ...]
    reasons: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])


def inventory() -> Inventory:
    """Look at every back-end. Imports torch, and Triton where it is installed."""
    reasons = {name: _reason(name) for name in registry.BACKENDS}
    have = {name: _operations(name) for name in registry.BACKENDS}
    usable = [name for name, reason in reasons.items() if reason is None]
    cpu = registry.resolve([b for b in HostDevice.backends if b in usable]).describe()
    gpu = registry.resolve(["triton", "reference"]).describe() if reasons["triton"] is None else {}
    entries = [
        Entry(
            name,
            tuple(b for b, ops in have.items() if name in ops),
            cpu.get(name),
            gpu.get(name),
            ABOUT[name],
        )
        for name in registry.OP_NAMES
    ]
    for name, (backend, about) in GROUPS.items():
        works = backend if backend in usable else None
        on_gpu = works if backend == "triton" else None
        entries.append(
            Entry(name, (backend,), None if backend == "triton" else works, on_gpu, about)
        )
    about = (
        "chooses tokens in the engine, with NumPy: on a CPU, and where `sample` lacks what is asked"
    )
    entries.append(Entry(HOST_SAMPLER, (HOST,), HOST, HOST if gpu else None, about))
    return Inventory(tuple(entries), reasons)


def _reason(backend: str) -> str | None:
    try:
        return registry.unavailable_reason(backend)
    except HeadraceError as error:  # HEADRACE_ISA asks for what this CPU has not
        return error.message


def _operations(backend: str) -> frozenset[str]:
    """Names of what a back-end has, also where it cannot be used; none if its code cannot be imported."""
    for module in (f"headrace.ops.{backend}.table", f"headrace.ops.{backend}"):
        try:
            return frozenset(op.name for op in importlib.import_module(module).OPS)
        except ImportError:
            continue
        except HeadraceError:
            continue
    return frozenset()
