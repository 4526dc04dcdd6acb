"""The profiler that fits an engine's device."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.gpu_profiler import GpuStepProfiler
from headrace.engine.parts import EngineParts
from headrace.engine.profiler import StepProfiler
from headrace.experts.live import LiveExperts
from headrace.ops.measure import step_marks
from headrace.ops.registry import unavailable_reason


def make_profiler(parts: EngineParts) -> StepProfiler:
    """Watches the steps of an engine of these parts.

    Raises:
        InternalError: the model's operations cannot be watched.
    """
    info, device = parts.info, parts.device.torch_device
    if device.type == "cuda" and unavailable_reason("triton") is None:
        executor = parts.experts.executor if isinstance(parts.experts, LiveExperts) else None
        found: StepProfiler = GpuStepProfiler(
            parts.decoder,
            info.kv_format,
            info.block_tokens,
            step_marks(device),
            parts.graphs,
            executor,
            device=parts.device,
        )
    else:
        found = StepProfiler(parts.decoder, info.kv_format, info.block_tokens)
    if parts.experts is not None:
        left = parts.experts.misses_of_twice_the_slots
        found.model = replace(found.model, misses_of_twice_the_slots=left)
    return found
