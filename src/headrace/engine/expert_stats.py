"""What a decoding step's experts did, as classes of the catalogue. Plain Python."""

from __future__ import annotations

from headrace.core.step import ClassStats, MovedBytes
from headrace.experts.step_record import ExpertStep
from headrace.explain import leaf


def expert_classes(step: ExpertStep, *, timed: bool = True) -> tuple[ClassStats, ...]:
    """Experts on the GPU (found in slots or fetched into them), fetches, experts on the CPU.

    All are counted. Fetches and the CPU run beside each other, and beside the GPU, so that only the
    longer of the two has its busy seconds, and the other none: added up, they stay within the step. The
    GPU's own kernels are parts of a captured graph and not timed one by one.

    timed: without it nothing has seconds: somebody else times what a step waits for.
    """
    slices = step.hits + step.fetched + step.computed
    flops = step.uses * step.slice_flops / slices if slices else 0.0
    on_gpu, nbytes = step.hits + step.fetched, step.slice_nbytes
    fetch_first = step.fetch_s >= step.compute_s
    found = (
        ClassStats(
            leaf.EXPERTS_GPU,
            step.num_layers if on_gpu else 0,
            round(on_gpu * flops),
            MovedBytes(hbm=on_gpu * nbytes),
            0.0,
        ),
        ClassStats(
            leaf.EXPERT_FETCH,
            step.fetched,
            0,
            MovedBytes(pcie=step.fetched * nbytes),
            step.fetch_s if fetch_first and timed else 0.0,
        ),
        ClassStats(
            leaf.EXPERTS_CPU,
            step.computed,
            round(step.computed * flops),
            MovedBytes(dram=step.computed * nbytes),
            0.0 if fetch_first or not timed else step.compute_s,
        ),
    )
    return tuple(one for one in found if one.calls)
