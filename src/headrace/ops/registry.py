"""Operations by name and back-end. Everything above asks here; nobody imports a kernel directly.

The signatures are one contract for every back-end (docs/architecture.md lists them); shapes and
dtypes stand in ``headrace.ops.reference``, whose functions are the oracles of the parity tests.
"""

from __future__ import annotations

import importlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InternalError, MachineError
from headrace.ops.expert_records import CpuExperts

# The back-end packages, each with a module-level ``OPS: tuple[Op, ...]``, or ``available() -> str |
# None`` that says why it cannot be used here.
BACKENDS = ("triton", "cpu", "reference")

OP_NAMES = (
    "embed",
    "rmsnorm",
    "linear",
    "linear_group",
    "gated_linear",
    "rope",
    "kv_append",
    "attention_prefill",
    "attention_decode",
    "sealed_append",
    "sealed_attention_prefill",
    "sealed_attention_decode",
    "router_topk",
    "moe",
    "attention_block",
    "dense_block",
    "route",
    "sample",
)


# Operations made of others. One serves only where its back-end serves all its parts, too: a back-end that
# brings attention of its own must not be passed over by another one's whole.
BLOCKS = {
    "attention_block": (
        *("rmsnorm", "linear_group", "rope", "kv_append", "attention_decode", "linear"),
    ),
    "dense_block": ("rmsnorm", "gated_linear", "linear"),
    "route": ("linear", "router_topk"),
}


# What a back-end may leave out, since others do without: the router as one launch only pays on a GPU, and
# beside a CPU the host's sampler chooses tokens (``engine.sampler``).
OPTIONAL = frozenset({"route", "sample"})


@dataclass(frozen=True)
class Op:
    """One implementation. ``tolerance``: largest |difference| / largest |value| to the float64 oracle.

    times_parts: a block whose function takes ``seconds``, doubles that grow by the times of its parts.
    takes_sealed: an ``attention_block`` that serves caches whose pages are sealed, too
    marks_parts: a block whose function takes ``mark``, which it calls with the place in ``BLOCKS`` of each
    part once that is launched; parts that are one kernel are marked once, as the first of them.
    """

    name: str
    backend: str
    function: Callable[..., Any]
    tolerance: float
    times_parts: bool = False
    takes_sealed: bool = False
    marks_parts: bool = False


# Told of each call: the operation's name, its positional arguments, and seconds.
OpWatcher = Callable[[str, tuple[Any, ...], float], None]
# Called behind each operation, or behind each part of a block that marks them: the operation's name, its
# positional arguments, and the part's place in ``BLOCKS`` (None: all of it).
OpMarker = Callable[[str, tuple[Any, ...], int | None], None]


@dataclass
class OpTimes:
    """What the calls of an operation took, since its watch began.

    seconds: around the calls; parts: doubles, those of a block that times its parts, in the order of
    ``BLOCKS`` (else none): what they leave of ``seconds`` is that of calling from Python
    """

    parts: array[float]
    calls: int = 0
    seconds: float = 0.0

    def take(self) -> tuple[int, float, list[float]]:
        """Calls, seconds and parts' seconds so far, which start again at nothing."""
        found = self.calls, self.seconds, self.parts.tolist()
        self.calls, self.seconds = 0, 0.0
        for index in range(len(self.parts)):
            self.parts[index] = 0.0
        return found


def _watched(op: Op, watcher: OpWatcher) -> Callable[..., Any]:
    """``op.function`` with a stop-watch around it."""
    name, function, now = op.name, op.function, time.perf_counter

    def whole(*args: Any) -> Any:
        start = now()
        result = function(*args)
        watcher(name, args, now() - start)
        return result

    return whole


def _timed(op: Op, times: OpTimes) -> Callable[..., Any]:
    """``op.function``, adding to ``times``: nobody is told at each call, which would cost more than the
    call's own arguments (6 us with cold caches, two Zen 4 cores, 2026-11)."""
    function, parts, now = op.function, times.parts, time.perf_counter

    def block(*args: Any) -> Any:
        start = now()
        result = function(*args, parts)
        times.seconds += now() - start
        times.calls += 1
        return result

    def whole(*args: Any) -> Any:
        start = now()
        result = function(*args)
        times.seconds += now() - start
        times.calls += 1
        return result

    return block if op.times_parts else whole


def _marked(op: Op, marker: OpMarker) -> Callable[..., Any]:
    """``op.function`` with a mark behind it, or behind each of its parts."""
    name, function = op.name, op.function
    if op.marks_parts:

        def block(*args: Any) -> Any:
            def mark(part: int) -> None:
                marker(name, args, part)

            return function(*args, mark=mark)

        return block

    def whole(*args: Any) -> Any:
        result = function(*args)
        marker(name, args, None)
        return result

    return whole


class OpSet:
    """The implementations chosen for a device, as attributes: ``ops.linear(x, weight)``."""

    def __init__(self, chosen: dict[str, Op]) -> None:
        self.chosen = chosen
        for name, op in chosen.items():
            setattr(self, name, op.function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise InternalError(f"operation {name!r} has no implementation on this device")

    def watch(
        self, watcher: OpWatcher | None, told: Sequence[str] = ("linear",)
    ) -> Mapping[str, OpTimes]:
        """Time every call from now on; None: stop, and call the kernels directly.

        ``watcher`` is told of the calls of operations whose arguments matter, ``told``. The others add to
        the times that are returned, by name. Callers look operations up at each call, so that this
        takes effect at once and costs nothing while nobody watches. On a device that computes behind
        the caller's back the times are those of the launches.
        """
        times: dict[str, OpTimes] = {}
        for name, op in self.chosen.items():
            function = op.function
            if watcher is not None and name in told:
                function = _watched(op, watcher)
            elif watcher is not None:
                parts = len(BLOCKS[name]) if op.times_parts else 0
                times[name] = OpTimes(array("d", bytes(8 * parts)))
                function = _timed(op, times[name])
            setattr(self, name, function)
        return times

    def mark(self, marker: OpMarker | None) -> None:
        """Call ``marker`` behind every operation from now on; None: stop. Takes the place of ``watch``.

        For devices that compute behind the caller's back: what the marker launches there runs between
        the operations' kernels, in a captured graph, too.
        """
        for name, op in self.chosen.items():
            setattr(self, name, op.function if marker is None else _marked(op, marker))

    def has(self, name: str) -> bool:
        """Whether there is an operation ``name``: those of ``BLOCKS`` may be missing."""
        return name in self.chosen

    def describe(self) -> dict[str, str]:
        """Which back-end serves each operation."""
        return {name: op.backend for name, op in self.chosen.items()}


def unavailable_reason(backend: str) -> str | None:
    """Why ``backend`` cannot be used on this machine, or None if it can."""
    module = importlib.import_module(f"headrace.ops.{backend}")
    check = getattr(module, "available", None)
    return check() if check is not None else None


# What attention over sealed pages takes.
SEALED = ("sealed_append", "sealed_attention_prefill", "sealed_attention_decode")


def serves(backend: str, names: Sequence[str]) -> bool:
    """Whether ``backend`` is usable here and has all of ``names``."""
    if unavailable_reason(backend) is not None:
        return False
    have = {op.name for op in importlib.import_module(f"headrace.ops.{backend}").OPS}
    return have.issuperset(names)


def set_num_threads(count: int) -> None:
    """Give every back-end with threads of its own ``count`` of them, the calling one included."""
    for backend in BACKENDS:
        if unavailable_reason(backend) is None:
            module = importlib.import_module(f"headrace.ops.{backend}")
            if hasattr(module, "set_num_threads"):
                module.set_num_threads(count)


def cpu_experts() -> CpuExperts:
    """What computes slices of experts on the CPU, now or as a service.

    Raises:
        MachineError: the C++ kernels are not there.
    """
    reason = unavailable_reason("cpu")
    if reason is not None:
        raise MachineError(
            f"experts cannot be computed on the CPU: {reason}",
            hint="install a C++ compiler and reinstall, or use --experts gpu",
        )
    module: Any = importlib.import_module("headrace.ops.cpu.expert_service")
    return module


def gpu_experts() -> Any:
    """The kernels of the expert cache: the module ``ops.triton.experts``.

    Raises:
        MachineError: Triton's kernels cannot run here.
    """
    reason = unavailable_reason("triton")
    if reason is not None:
        raise MachineError(
            f"the expert cache has no GPU kernels: {reason}", hint="use --device cpu"
        )
    return importlib.import_module("headrace.ops.triton.experts")


def instruction_set(backend: str) -> str | None:
    """The CPU instruction set that ``backend`` computes with, if it has a say in that."""
    chosen = getattr(importlib.import_module(f"headrace.ops.{backend}"), "isa", None)
    return chosen() if chosen is not None else None


def why_no_tiles(backend: str) -> str | None:
    """Why ``backend`` does without matrix tiles, empty if it uses them; None if it knows of none."""
    reason = getattr(importlib.import_module(f"headrace.ops.{backend}"), "why_no_tiles", None)
    return reason() if reason is not None else None


def whole_blocks(chosen: dict[str, Op]) -> dict[str, Op]:
    """``chosen`` without the blocks whose parts another back-end serves."""

    def fits(name: str) -> bool:
        backend = chosen[name].backend
        return all(p in chosen and chosen[p].backend == backend for p in BLOCKS.get(name, ()))

    return {name: op for name, op in chosen.items() if fits(name)}


def resolve(backends: Sequence[str]) -> OpSet:
    """Take each operation from the first of ``backends`` that is usable here and has it."""
    chosen: dict[str, Op] = {}
    for backend in backends:
        if unavailable_reason(backend) is not None:
            continue
        for op in importlib.import_module(f"headrace.ops.{backend}").OPS:
            chosen.setdefault(op.name, op)
    return OpSet(whole_blocks(chosen))
