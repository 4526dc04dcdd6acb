"""Seconds of a step's classes on a GPU, from rates that ``engine.gpu_kernel_probe`` measured in graphs.

A step of few rows is a captured graph of kernels, one after another, that read each matrix once. A
prompt's part is launched kernel by kernel and bound by arithmetic, or by the launches if it is short.

Rates of a ``MachineProfile``, beside those of ``kernel_rates``:

- ``kernel_one_CLASS`` (GB/s), ``kernel_many_CLASS`` (GFLOP/s): as on a CPU, starts and tails included
- ``call_CLASS`` (s): one of a class that reads little: a norm, the rotation with the cache's write, the
  embedding, the choice of the largest logit
- ``attention_t<n>`` (s): a layer's attention of one sequence over n tokens; between the lengths that were
  measured it is taken to be straight, and beyond them it goes on as between the last two
- ``kernel_launch`` (s): of one kernel outside of a graph
- ``block_host`` (s): of the host, for each block of a sequence's cache, beside ``step_host``
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from headrace.core.errors import MachineError
from headrace.explain import leaf
from headrace.explain.cost import rate_of
from headrace.explain.running_cost import MATRICES, ClassWork, RunningModel, StepRows, rate_name
from headrace.machine.profile import MachineProfile

# Lengths at which attention is measured on a GPU, where its time is no straight line.
ATTENTION_POINTS = (128, 512, 2048, 8192, 32768, 131072)
FEW_ROWS = 16  # of the largest captured step
# Kernels of a layer outside of a graph: norm, three products, rotations, append, attention, product; norm,
# three products and the activation's four.
EAGER_KERNELS = 20
_CALLS = {
    leaf.EMBED: "call_token_embedding",
    leaf.RMSNORM: "call_rmsnorm",
    leaf.SAMPLING: "call_sampling",
}


def is_captured(rows: StepRows) -> bool:
    """Whether a captured graph serves such a step, and the next one is launched before it has ended."""
    return rows.decode and rows.tokens <= FEW_ROWS


def gpu_classes(
    model: RunningModel, costs: Mapping[str, ClassWork], rows: StepRows, machine: MachineProfile
) -> dict[str, float]:
    """Seconds by class.

    Raises:
        MachineError: a rate is missing; the message names it.
    """
    if is_captured(rows):
        return {name: _captured(model, name, one, rows, machine) for name, one in costs.items()}
    found = {name: _launched(name, one, machine) for name, one in costs.items()}
    launches = EAGER_KERNELS * model.spec.num_layers * rate_of(machine, "kernel_launch")
    return {**found, leaf.LAUNCHES: max(0.0, launches - sum(found.values()))}


def _captured(
    model: RunningModel, name: str, one: ClassWork, rows: StepRows, machine: MachineProfile
) -> float:
    if not one.calls:
        return 0.0
    if name in _CALLS:
        return (1 if name == leaf.SAMPLING else one.calls) * rate_of(machine, _CALLS[name])
    if name in MATRICES:
        return _product(name, one, machine)
    if name == leaf.ATTENTION_DECODE:
        return sum(
            attention_seconds(_seen(rows, layer.window), machine) for layer in model.spec.layers
        )
    # What the rotation's kernel writes into the cache is in its own time.
    fused = "call_rope_rotation" in machine.rates
    if name == leaf.ROPE and fused:
        return one.calls * rate_of(machine, "call_rope_rotation")
    return 0.0 if fused else one.calls * rate_of(machine, "call_rmsnorm")


def _launched(name: str, one: ClassWork, machine: MachineProfile) -> float:
    if not one.calls:
        return 0.0
    if name in MATRICES and name != leaf.EMBED:
        return _product(name, one, machine)
    if name == leaf.ATTENTION_PREFILL:
        return one.work.flops / rate_of(machine, "kernel_attention_prefill")
    if name == leaf.SAMPLING:
        return rate_of(machine, "call_sampling")
    return one.work.hbm_nbytes / rate_of(machine, "hbm_read")


def _product(name: str, one: ClassWork, machine: MachineProfile) -> float:
    ident = rate_name(name)
    read = one.matrix_nbytes / rate_of(machine, f"kernel_one_{ident}")
    return max(read, one.work.flops / rate_of(machine, f"kernel_many_{ident}"))


def _seen(rows: StepRows, window: int | None) -> int:
    """Keys that all sequences' rows see in a layer: programs of several fill the GPU like one's."""
    lengths = [new + cached for new, cached in rows.sequences]
    return sum(n if window is None else min(n, window) for n in lengths)


def attention_seconds(tokens: int, machine: MachineProfile) -> float:
    """Of one layer's decoding attention over ``tokens`` keys.

    Raises:
        MachineError: fewer than two lengths were measured.
    """
    known = [
        (n, machine.rates[f"attention_t{n}"].value)
        for n in ATTENTION_POINTS
        if f"attention_t{n}" in machine.rates
    ]
    if len(known) < 2:
        raise MachineError(
            f"the machine {machine.name!r} has no rates attention_t<n>, which this work needs",
            hint="let `headrace explain` measure the kernels: leave --no-probe out",
        )
    pairs = list(pairwise(known))
    (left, low), (right, high) = next((p for p in pairs if tokens <= p[1][0]), pairs[-1])
    return max(low + (high - low) * (tokens - left) / (right - left), known[0][1])
