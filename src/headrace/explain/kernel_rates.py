"""What a step should take with this engine's own kernels: work over rates that a probe measured.

A floor divides by what the hardware can do. This divides by what the kernels reach on matrices and
caches of other sizes than the model's, measured beforehand, and adds a wake of the threads for each
operation and the host's work for each step. Nothing in it is fitted to the steps that it predicts.

Rates of a ``MachineProfile``, beside the hardware's:

- ``kernel_matvec_<format>`` (GB/s of stored weights, one row), ``kernel_matmul_<format>`` (GFLOP/s, many)
- ``kernel_attention_decode_<cache>`` (GB/s of the cache), ``kernel_attention_prefill_<cache>`` (GFLOP/s)
- ``kernel_rows`` (GFLOP/s of norms, rotations and the like), ``kernel_sampler`` (GB/s of logits)
- ``thread_wake``, ``op_call``, ``step_host``, ``token_host`` (s): of an operation; of a call from Python;
  of the host for each step; for each sequence in it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.errors import MachineError
from headrace.explain import leaf
from headrace.explain.cost import rate_of
from headrace.explain.running_cost import (
    MATRICES,
    ClassWork,
    RunningModel,
    StepRows,
    running_cost,
)
from headrace.machine.profile import MachineProfile

# Calls from Python of a layer: with its halves fused, and one by one (layers/attention.py, dense.py).
FUSED_CALLS, SINGLE_CALLS = 2, 10
MIXTURE_CALLS = 4  # norm, router, choice, experts
OTHER_CALLS = 3  # embedding, last norm, head
_ATTENTION = {leaf.ATTENTION_DECODE: "decode", leaf.ATTENTION_PREFILL: "prefill"}


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step by class, and of the calls between them."""

    classes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.classes.values())


def has_kernel_rates(machine: MachineProfile, model: RunningModel) -> bool:
    """Whether the probe has been run for this model's formats."""
    try:
        predict(model, StepRows(((1, 1),), 1), machine)
    except MachineError:
        return False
    return True


def predict(model: RunningModel, rows: StepRows, machine: MachineProfile) -> Predicted:
    """Seconds of a step.

    Raises:
        MachineError: a rate is missing; the message names it.
    """
    classes = {
        name: _class_seconds(name, one, model, rows, machine)
        for name, one in running_cost(model, rows).items()
    }
    classes[leaf.LAUNCHES] = _calls(model, rows) * rate_of(machine, "op_call")
    classes[leaf.SCHEDULE] = rate_of(machine, "step_host")
    classes[leaf.DETOKENIZE] = rows.sampled * rate_of(machine, "token_host")
    return Predicted(classes)


def _calls(model: RunningModel, rows: StepRows) -> int:
    layers = model.spec.num_layers
    mixtures = sum(layer.moe for layer in model.spec.layers)
    if not rows.decode:
        return SINGLE_CALLS * layers + OTHER_CALLS
    dense = layers - mixtures
    return dense * FUSED_CALLS + mixtures * (1 + MIXTURE_CALLS) + OTHER_CALLS


def _class_seconds(
    name: str, one: ClassWork, model: RunningModel, rows: StepRows, machine: MachineProfile
) -> float:
    if not one.calls:
        return 0.0
    flops = one.work.flops
    if name in MATRICES and name != leaf.EMBED:
        return one.calls * rate_of(machine, "thread_wake") + _products(name, one, model, machine)
    if name in _ATTENTION:
        kind = f"kernel_attention_{_ATTENTION[name]}_{model.kv_format}"
        amount = one.work.dram_nbytes if rows.decode else flops
        return one.calls * rate_of(machine, "thread_wake") + amount / rate_of(machine, kind)
    if name == leaf.SAMPLING:
        return one.work.dram_nbytes / rate_of(machine, "kernel_sampler")
    return flops / rate_of(machine, "kernel_rows")


def _products(name: str, one: ClassWork, model: RunningModel, machine: MachineProfile) -> float:
    """Products with the class's matrices, each kind at its format's rates."""
    kinds = [kind for kind in MATRICES[name] if kind in model.matrices]
    total = sum(model.matrices[kind].nbytes for kind in kinds)
    seconds = 0.0
    for kind in kinds:
        stored = model.matrices[kind]
        share = stored.nbytes / total
        read = one.matrix_nbytes * share / rate_of(machine, f"kernel_matvec_{stored.format}")
        multiplied = one.work.flops * share / rate_of(machine, f"kernel_matmul_{stored.format}")
        seconds += max(read, multiplied)
    return seconds
