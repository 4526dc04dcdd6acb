"""Builds a decoder from an opened checkpoint. Big matrices stay mapped, exactly as stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from headrace.checkpoint.records import Checkpoint
from headrace.core.errors import InternalError
from headrace.core.model_spec import ModelSpec, MoeSpec
from headrace.core.weight_shapes import (
    attention_shapes,
    core_shapes,
    dense_shapes,
    expert_shapes,
    router_shapes,
)
from headrace.formats.base import PackedTensor
from headrace.layers.attention import Attention, AttentionShape, AttentionWeights
from headrace.layers.dense import DenseFeedForward
from headrace.layers.linear import Linear
from headrace.layers.moe import Mixture
from headrace.layers.norm import Norm
from headrace.layers.rope import build_rope_table
from headrace.layers.router import Router
from headrace.machine.device import Device
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.weights import FLOAT_FORMATS, WeightSource, split_rows, transpose_stacked
from headrace.ops.records import Activation, ExpertWeights, RopeTable
from headrace.ops.registry import OpSet

Shapes = dict[str, tuple[int, ...]]


def load_model(
    checkpoint: Checkpoint,
    ops: OpSet,
    device: Device,
    *,
    max_positions: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Decoder:
    """Build the decoder.

    Args:
        checkpoint: opened and checked.
        ops: the operations that the decoder calls.
        device: where the weights go; on the host they stay where they are mapped.
        max_positions: rows of the rotary table; the model's whole context if None.
        progress: called with ("weights", fraction done) after every layer.

    Raises:
        CheckpointError: a weight is missing, has a wrong shape, or has no place in the model.
    """
    spec = _tied_as_stored(checkpoint)
    source = WeightSource(checkpoint, device.torch_device)
    positions = max_positions or spec.max_context
    shapes = core_shapes(spec)
    embed = source.packed("embed", shapes["embed"])
    if spec.tie_embeddings:
        source.skip("lm_head")  # some files carry the tied matrix twice
        lm_head = embed
    else:
        lm_head = source.packed("lm_head", shapes["lm_head"])
    divisors = None
    if source.has("rope_freqs"):
        divisors = source.small("rope_freqs", (spec.rope.dim // 2,)).cpu()
    table = build_rope_table(
        spec.rope,
        positions,
        interleaved=checkpoint.rope_interleaved,
        divisors=divisors,
        device=device.torch_device,
    )
    builder = _LayerBuilder(checkpoint, source, spec, ops, table)
    layers: list[DecoderLayer] = []
    for index in range(spec.num_layers):
        layers.append(builder.layer(index))
        if progress is not None:
            progress("weights", (index + 1) / spec.num_layers)
    final_norm = Norm(ops, source.small("final_norm", shapes["final_norm"]), spec.norm_eps)
    source.require_all_taken()
    return Decoder(spec, ops, embed, layers, final_norm, lm_head, positions)


def _tied_as_stored(checkpoint: Checkpoint) -> ModelSpec:
    """GGUF has no key for tied embeddings: the file ties where it has no output matrix."""
    spec = checkpoint.spec
    if checkpoint.kind != "gguf":
        return spec
    return replace(spec, tie_embeddings="lm_head" not in checkpoint.tensors)


class _LayerBuilder:
    """Builds one layer after another from the same source."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: WeightSource,
        spec: ModelSpec,
        ops: OpSet,
        table: RopeTable,
    ) -> None:
        self._transposed = (
            checkpoint.kind == "safetensors" and checkpoint.family.unquantised_experts_transposed
        )
        self._tensors = checkpoint.tensors
        self._source = source
        self._spec = spec
        self._ops = ops
        self._table = table
        self._act = Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit)

    def layer(self, index: int) -> DecoderLayer:
        spec, prefix = self._spec, f"layers.{index}."
        self._source.skip(prefix + "rope_inv_freq")
        return DecoderLayer(
            self._ops,
            self._norm(prefix + "attn_norm"),
            self._attention(prefix, spec.layers[index].window),
            self._norm(prefix + "ffn_norm"),
            self._mixture(index, prefix) if spec.layers[index].moe else self._dense(prefix),
        )

    def _norm(self, name: str) -> Norm:
        return Norm(self._ops, self._source.small(name, (self._spec.hidden,)), self._spec.norm_eps)

    def _attention(self, prefix: str, window: int | None) -> Attention:
        spec, source = self._spec, self._source
        shapes = attention_shapes(spec)

        def matrix(name: str) -> PackedTensor:
            return source.packed(prefix + name, shapes[name])

        def small(name: str) -> torch.Tensor | None:
            return source.small(prefix + name, shapes[name]) if name in shapes else None

        weights = AttentionWeights(
            q=matrix("q"),
            k=matrix("k"),
            v=matrix("v"),
            o=matrix("o"),
            q_bias=small("q_bias"),
            k_bias=small("k_bias"),
            v_bias=small("v_bias"),
            o_bias=small("o_bias"),
            q_norm=small("q_norm"),
            k_norm=small("k_norm"),
            sinks=small("sinks"),
        )
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, window)
        return Attention(self._ops, weights, shape, self._table, spec.norm_eps)

    def _dense(self, prefix: str) -> DenseFeedForward:
        gate, up, down = (
            self._source.packed(prefix + name, shape)
            for name, shape in dense_shapes(self._spec).items()
        )
        return DenseFeedForward(self._ops, gate, up, down, self._act)

    def _mixture(self, index: int, prefix: str) -> Mixture:
        moe = self._spec.moe
        if moe is None:
            raise InternalError(f"layer {index} is a mixture, but the model has no MoeSpec")
        shapes = router_shapes(self._spec, moe)
        matrix = self._source.small(prefix + "router", shapes["router"])
        bias = None
        if "router_bias" in shapes:
            bias = self._source.small(prefix + "router_bias", shapes["router_bias"])
        linear = Linear(self._ops, PackedTensor("f32", tuple(matrix.shape), {"data": matrix}), bias)
        experts = self._experts(prefix, moe, expert_shapes(self._spec, moe))
        return Mixture(self._ops, index, Router(self._ops, linear, moe), experts, self._act)

    def _experts(self, prefix: str, moe: MoeSpec, shapes: Shapes) -> ExpertWeights:
        if self._source.has(prefix + "experts.gate_up"):
            gate, up = self._joined(prefix, moe, shapes["experts.gate"])
        else:
            gate = self._each(prefix, "gate", moe, shapes)
            up = self._each(prefix, "up", moe, shapes)
        down = self._each(prefix, "down", moe, shapes)
        if not moe.expert_bias:
            return ExpertWeights(gate, up, down)
        gate_bias, up_bias = self._gate_up_bias(prefix, moe, shapes)
        down_bias = self._source.small(prefix + "experts.down_bias", shapes["experts.down_bias"])
        return ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)

    def _joined(
        self, prefix: str, moe: MoeSpec, half: tuple[int, ...]
    ) -> tuple[list[PackedTensor], list[PackedTensor]]:
        shape = (half[0], 2 * half[1], half[2])
        stacked = self._stacked(prefix + "experts.gate_up", shape)
        gate, up = split_rows(stacked, interleaved=moe.gate_up_interleaved)
        experts = range(moe.num_experts)
        return [gate.expert(e) for e in experts], [up.expert(e) for e in experts]

    def _each(self, prefix: str, name: str, moe: MoeSpec, shapes: Shapes) -> list[PackedTensor]:
        """One matrix of every expert, from a stacked tensor or from one tensor each."""
        shape = shapes[f"experts.{name}"]
        experts = range(moe.num_experts)
        if self._source.has(f"{prefix}experts.0.{name}"):
            return [self._source.packed(f"{prefix}experts.{e}.{name}", shape[1:]) for e in experts]
        stacked = self._stacked(f"{prefix}experts.{name}", shape)
        return [stacked.expert(e) for e in experts]

    def _stacked(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        raw = self._tensors.get(name)
        if raw is not None and self._transposed and raw.format in FLOAT_FORMATS:
            return transpose_stacked(self._source.packed(name, (shape[0], shape[2], shape[1])))
        return self._source.packed(name, shape)

    def _gate_up_bias(
        self, prefix: str, moe: MoeSpec, shapes: Shapes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = shapes["experts.gate_bias"]
        if not self._source.has(prefix + "experts.gate_up_bias"):
            return (
                self._source.small(prefix + "experts.gate_bias", shape),
                self._source.small(prefix + "experts.up_bias", shape),
            )
        joined = self._source.small(prefix + "experts.gate_up_bias", (shape[0], 2 * shape[1]))
        if moe.gate_up_interleaved:
            return joined[:, 0::2].contiguous(), joined[:, 1::2].contiguous()
        return joined[:, : shape[1]].contiguous(), joined[:, shape[1] :].contiguous()
