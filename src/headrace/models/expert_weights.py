"""One mixture's experts out of a checkpoint, however the file arranges them."""

from __future__ import annotations

import torch

from headrace.checkpoint.records import Checkpoint
from headrace.core.model_spec import MoeSpec
from headrace.formats.base import PackedTensor
from headrace.models.weights import FLOAT_FORMATS, WeightSource, split_rows, transpose_stacked
from headrace.ops.records import ExpertWeights

Shapes = dict[str, tuple[int, ...]]
Experts = list[PackedTensor]


class ExpertReader:
    """Reads stacked experts and single ones, gate and up joined or apart.

    Args:
        shapes: of ``core.weight_shapes.expert_shapes``.
    """

    def __init__(
        self, checkpoint: Checkpoint, source: WeightSource, moe: MoeSpec, shapes: Shapes
    ) -> None:
        self._transposed = (
            checkpoint.kind == "safetensors" and checkpoint.family.unquantised_experts_transposed
        )
        self._tensors = checkpoint.tensors
        self._source = source
        self._moe = moe
        self._shapes = shapes

    def read(self, prefix: str) -> ExpertWeights:
        """The experts of the layer whose canonical names begin with ``prefix``.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        if self._source.has(prefix + "experts.gate_up"):
            gate, up = self._joined(prefix)
        else:
            gate, up = self._each(prefix, "gate"), self._each(prefix, "up")
        down = self._each(prefix, "down")
        if not self._moe.expert_bias:
            return ExpertWeights(gate, up, down)
        gate_bias, up_bias = self._gate_up_bias(prefix)
        shape = self._shapes["experts.down_bias"]
        down_bias = self._source.small(prefix + "experts.down_bias", shape)
        return ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)

    def _joined(self, prefix: str) -> tuple[Experts, Experts]:
        count, rows, cols = self._shapes["experts.gate"]
        stacked = self._stacked(prefix + "experts.gate_up", (count, 2 * rows, cols))
        gate, up = split_rows(stacked, interleaved=self._moe.gate_up_interleaved)
        return [gate.expert(e) for e in range(count)], [up.expert(e) for e in range(count)]

    def _each(self, prefix: str, name: str) -> Experts:
        """One matrix of every expert, from a stacked tensor or from one tensor each."""
        shape = self._shapes[f"experts.{name}"]
        experts = range(shape[0])
        if self._source.has(f"{prefix}experts.0.{name}"):
            return self._source.matrices(
                [f"{prefix}experts.{e}.{name}" for e in experts], shape[1:]
            )
        stacked = self._stacked(f"{prefix}experts.{name}", shape)
        return [stacked.expert(e) for e in experts]

    def _stacked(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        raw = self._tensors.get(name)
        if raw is not None and self._transposed and raw.format in FLOAT_FORMATS:
            return transpose_stacked(self._source.matrix(name, (shape[0], shape[2], shape[1])))
        return self._source.matrix(name, shape)

    def _gate_up_bias(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shapes["experts.gate_bias"]
        if not self._source.has(prefix + "experts.gate_up_bias"):
            return (
                self._source.small(prefix + "experts.gate_bias", shape),
                self._source.small(prefix + "experts.up_bias", shape),
            )
        joined = self._source.small(prefix + "experts.gate_up_bias", (shape[0], 2 * shape[1]))
        if self._moe.gate_up_interleaved:
            return joined[:, 0::2].contiguous(), joined[:, 1::2].contiguous()
        return joined[:, : shape[1]].contiguous(), joined[:, shape[1] :].contiguous()
