"""Rates of a loaded engine's kernels, on whichever device they run."""

from __future__ import annotations

import time
from statistics import median

from headrace.core.errors import InternalError
from headrace.engine.engine import Engine
from headrace.engine.gpu_expert_probe import probe_experts
from headrace.engine.gpu_kernel_probe import GpuProbe
from headrace.engine.gpu_path_probe import probe_paths
from headrace.engine.host_probe import probe_host
from headrace.engine.kernel_probe import probe_kernels
from headrace.engine.parts import EngineParts
from headrace.engine.profiler import Profilable
from headrace.engine.this_machine import measured_rate
from headrace.experts.live import LiveExperts
from headrace.explain.running_cost import RunningModel
from headrace.kv.storage import is_out_of_memory
from headrace.machine.profile import Rate
from headrace.ops.measure import step_marks
from headrace.ops.records import Activation
from headrace.ops.registry import unavailable_reason

# Kernels of a captured layer: two norms, three products, rotation, attention in two, gate and up, down; a
# mixture has a few more. What the host needs to start a graph grows with them, slowly.
KERNELS_A_LAYER = 10
BETWEEN_STEPS = 12  # few enough for the live rates, which count steps without samples


def probe_engine(engine: Engine) -> dict[str, Rate]:
    """Every rate that predicting this engine's steps takes, by name. The engine must be idle.

    Raises:
        InternalError: the model's operations cannot be watched.
        OutOfMemoryError: of torch; matrices of the probe's own do not fit beside the model.
    """
    profiler = engine.watch_classes(True)
    engine.watch_classes(False)
    if profiler is None:
        raise InternalError("the engine does not say what it watches with")
    if not profiler.model.gpu:
        return probe_kernels(profiler.ops, profiler.model)
    if unavailable_reason("triton") is not None:
        return {}
    return probe_gpu(engine.parts, profiler.model)


def probe_gpu(parts: EngineParts, model: RunningModel) -> dict[str, Rate]:
    """Rates of the kernels that a GPU's steps are made of, and of the host beside them."""
    device, spec = parts.device, model.spec
    if not isinstance(parts.decoder, Profilable):
        raise InternalError(f"{type(parts.decoder).__name__} has no operations to watch")
    probe = GpuProbe(device, parts.decoder.ops, model)
    try:
        rates = probe.rates() | probe_gpu_host(parts)
        if isinstance(parts.experts, LiveExperts):
            executor = parts.experts.executor
            act = Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit)
            rates |= probe_experts(
                device,
                probe,
                executor.store.layout,
                executor.plan_shape,
                executor.shape.top_k,
                act,
            )
            rates |= probe_paths(parts.experts, device, step_marks(device.torch_device))
    finally:
        device.release_cached()
    return rates


def probe_gpu_host(parts: EngineParts) -> dict[str, Rate]:
    """Those of the rates that are the host's, which also change while the GPU's do not."""
    device = parts.device
    kernels = KERNELS_A_LAYER * parts.decoder.spec.num_layers
    rates = probe_host(device, kernels, step_marks(device.torch_device))
    if isinstance(parts.experts, LiveExperts):
        rates["experts_host"] = _experts_host(parts.experts)
    return rates


def _experts_host(experts: LiveExperts) -> Rate:
    """What the host does for an executor's experts before and after each step."""
    times: list[float] = []
    for _ in range(BETWEEN_STEPS):
        start = time.perf_counter()
        experts.step_begins(1)
        experts.step_ended()
        times.append(time.perf_counter() - start)
    return measured_rate(median(times), "s", "between steps that use no experts")


def has_room(error: BaseException) -> bool:
    """Whether ``probe_engine`` failed for something else than memory."""
    return not is_out_of_memory(error)
