"""The expert cache's kernels, as ``ops.registry.gpu_experts`` returns them."""

from __future__ import annotations

from headrace.ops.triton.expert_block_launch import BlockTuning
from headrace.ops.triton.expert_chunk import GpuAnswer, GroupedChunk
from headrace.ops.triton.expert_geometry import MatrixPlace, SliceGeometry
from headrace.ops.triton.expert_launch import (
    FORMATS,
    ExpertLauncher,
    RequestOffsets,
    Tuning,
)
from headrace.ops.triton.expert_prefetch import FORMATS as ROUTER_FORMATS
from headrace.ops.triton.expert_prefetch import PrefetchLauncher
from headrace.ops.triton.expert_state import (
    COPY_WORDS,
    NUM_COUNTS,
    PlanGeometry,
    PlanState,
    new_plan_state,
    plan_layer,
    start_step,
)

__all__ = [
    "COPY_WORDS",
    "FORMATS",
    "NUM_COUNTS",
    "ROUTER_FORMATS",
    "BlockTuning",
    "ExpertLauncher",
    "GpuAnswer",
    "GroupedChunk",
    "MatrixPlace",
    "PlanGeometry",
    "PlanState",
    "PrefetchLauncher",
    "RequestOffsets",
    "SliceGeometry",
    "Tuning",
    "new_plan_state",
    "plan_layer",
    "start_step",
]
