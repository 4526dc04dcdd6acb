"""The experts of a model into host memory, within what was resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.engine.resolved import Resolved
from headrace.experts.slab_pack import layouts_of
from headrace.experts.store import HostStore, build_store, host_limits
from headrace.machine.pinned import Pinner
from headrace.ops.records import ExpertWeights


def load_host_store(
    resolved: Resolved,
    experts: Sequence[ExpertWeights],
    progress: Callable[[str, float], None] | None = None,
    pinner: Pinner | None = None,
) -> HostStore:
    """Repack the experts of every mixture into slabs: pinned, or mapped where RAM is short.

    Args:
        resolved: limits and threads; experts lie in host memory (``slots``).
        pinner: CUDA's if None.

    Raises:
        DoesNotFitError: neither RAM nor the folder of ``--expert-disk`` has room.
        UnsupportedModelError: experts of a layer differ in format, or gate and up do.
    """
    limits = host_limits(
        ram_nbytes=resolved.expert_ram_nbytes, pin_nbytes=resolved.pin_budget_nbytes
    )
    return build_store(
        experts,
        layouts_of(experts),
        threads=resolved.threads,
        pin=True,
        disk=None if resolved.expert_disk is None else Path(resolved.expert_disk).expanduser(),
        progress=progress,
        limits=limits,
        pinner=pinner,
    )
