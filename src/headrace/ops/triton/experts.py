"""The expert cache's kernels, as ``ops.registry.gpu_experts`` returns them."""

from __future__ import annotations

from headrace.ops.triton.expert_block_launch import BlockTuning, MatrixPlace
from headrace.ops.triton.expert_chunk import GROUPED_FORMATS, GpuAnswer, GroupedChunk
from headrace.ops.triton.expert_launch import (
    FORMATS,
    ExpertLauncher,
    RequestOffsets,
    SliceGeometry,
    Tuning,
)
from headrace.ops.triton.expert_slice import slice_product
from headrace.ops.triton.expert_state import (
    NUM_COUNTS,
    PlanGeometry,
    PlanState,
    new_plan_state,
    plan_layer,
    start_step,
)

__all__ = [
    "FORMATS",
    "GROUPED_FORMATS",
    "NUM_COUNTS",
    "BlockTuning",
    "ExpertLauncher",
    "GpuAnswer",
    "GroupedChunk",
    "MatrixPlace",
    "PlanGeometry",
    "PlanState",
    "RequestOffsets",
    "SliceGeometry",
    "Tuning",
    "new_plan_state",
    "plan_layer",
    "slice_product",
    "start_step",
]
