"""What a step should take with this engine's own kernels: work over rates that a probe measured.

A floor divides by what the hardware can do. This divides by what the kernels reach on synthetic matrices
and caches, measured beforehand, and adds calls from Python and the host's work for each step, as far as a
GPU's work does not hide it. Nothing in it is fitted to the steps that it predicts.

Rates of a ``MachineProfile``, beside the hardware's; CLASS is the id with underscores:

- ``kernel_one_CLASS`` (GB/s of stored weights at one row), ``kernel_many_CLASS`` (GFLOP/s at many): its
  operations with matrices of the model's shapes and formats, wakes of the threads included
- ``call_CLASS`` (s): one of a class that reads little, at one row: a norm, a rotation, a write into the
  cache, the embedding
- ``kernel_attention_decode`` (GB/s of the cache) and ``attention_call`` (s, of each layer beside that),
  ``kernel_attention_prefill`` (GFLOP/s)
- ``kernel_rows`` (GFLOP/s of a prompt's norms, rotations and the like), ``kernel_sampler`` (GB/s of logits)
- ``layer_calls`` (s): what calling a decoding layer from Python takes, beside its kernels; ``op_call``: one
  operation, of a prompt's part, where each is called by itself
- ``step_host``, ``token_host`` (s): of the host for each step; for each sequence in it

A GPU's are ``gpu_kernel_rates``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.core.errors import MachineError
from headrace.explain import leaf
from headrace.explain.cost import rate_of
from headrace.explain.gpu_kernel_rates import gpu_classes, is_captured
from headrace.explain.running_cost import (
    MATRICES,
    ClassWork,
    RunningModel,
    StepRows,
    rate_name,
    running_cost,
)
from headrace.machine.profile import MachineProfile

# Calls from Python of a prompt's part: of a layer (layers/attention.py, dense.py); embedding, norm and head.
LAYER_CALLS, OTHER_CALLS = 10, 3
_ROWS = (leaf.EMBED, leaf.RMSNORM, leaf.ROPE, leaf.KV_APPEND)


@dataclass(frozen=True)
class ExpertSeconds:
    """Of all mixtures' experts that lie in host memory: on the GPU, and what fetches and the CPU's part
    add to that, since they run beside it."""

    gpu_s: float
    fetch_s: float = 0.0
    cpu_s: float = 0.0
    host_s: float = 0.0  # of the host between steps

    @property
    def seconds(self) -> float:
        """Of the layers."""
        return self.gpu_s + self.fetch_s + self.cpu_s


ExpertPrice = Callable[[MachineProfile], ExpertSeconds]


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step by class, and of the calls between them."""

    classes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.classes.values())


def predict(
    model: RunningModel,
    rows: StepRows,
    machine: MachineProfile,
    experts: ExpertSeconds | None = None,
) -> Predicted:
    """Seconds of a step.

    Args:
        experts: that are not among the model's matrices, as the engine predicts them.

    Raises:
        MachineError: a rate is missing; the message names it.
    """
    costs = running_cost(model, rows)
    if model.gpu:
        classes = gpu_classes(model, costs, rows, machine)
        if experts is None and leaf.EXPERTS_GPU in costs and not costs[leaf.EXPERTS_GPU].calls:
            raise MachineError("nobody says what the experts in host memory take")
        if experts is not None:
            classes[leaf.EXPERTS_GPU] = experts.gpu_s
            classes[leaf.EXPERT_FETCH] = experts.fetch_s
            classes[leaf.EXPERTS_CPU] = experts.cpu_s
    else:
        classes = {name: _class_seconds(name, one, rows, machine) for name, one in costs.items()}
        classes[leaf.LAUNCHES] = _calls(model, rows, machine)
    gpu_s = sum(classes.values())
    classes[leaf.SCHEDULE] = rate_of(machine, "step_host")
    if model.gpu:
        blocks = sum(-(-(new + cached) // model.block_tokens) for new, cached in rows.sequences)
        classes[leaf.SCHEDULE] += blocks * rate_of(machine, "block_host")
        classes[leaf.SCHEDULE] += 0.0 if experts is None else experts.host_s
    classes[leaf.DETOKENIZE] = rows.sampled * rate_of(machine, "token_host")
    if model.gpu and is_captured(rows):
        # The next step is launched before the host handles this one's result: what it does meanwhile shows
        # only where it takes longer than the GPU.
        hidden = min(1.0, gpu_s / (classes[leaf.SCHEDULE] + classes[leaf.DETOKENIZE]))
        classes[leaf.SCHEDULE] *= 1 - hidden
        classes[leaf.DETOKENIZE] *= 1 - hidden
    return Predicted(classes)


def _calls(model: RunningModel, rows: StepRows, machine: MachineProfile) -> float:
    """Seconds of calling a step's operations from Python."""
    layers = model.spec.num_layers
    if rows.decode:
        return layers * rate_of(machine, "layer_calls")
    return (LAYER_CALLS * layers + OTHER_CALLS) * rate_of(machine, "op_call")


def _class_seconds(name: str, one: ClassWork, rows: StepRows, machine: MachineProfile) -> float:
    if not one.calls:
        return 0.0
    flops = one.work.flops
    if name in MATRICES and name != leaf.EMBED:
        ident = rate_name(name)
        read = one.matrix_nbytes / rate_of(machine, f"kernel_one_{ident}")
        return max(read, flops / rate_of(machine, f"kernel_many_{ident}"))
    if name == leaf.ATTENTION_DECODE:
        calls = len(rows.sequences) * one.calls
        read = one.work.dram_nbytes / rate_of(machine, "kernel_attention_decode")
        return calls * rate_of(machine, "attention_call") + read
    if name == leaf.ATTENTION_PREFILL:
        return flops / rate_of(machine, "kernel_attention_prefill")
    if name == leaf.SAMPLING:
        return one.work.dram_nbytes / rate_of(machine, "kernel_sampler")
    if rows.decode and name in _ROWS:
        return one.calls * rows.tokens * rate_of(machine, f"call_{rate_name(name)}")
    return flops / rate_of(machine, "kernel_rows")
