"""Builds a decoder from an opened checkpoint. Big matrices stay mapped, exactly as stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from headrace.checkpoint.records import Checkpoint
from headrace.core.errors import InternalError
from headrace.core.model_spec import LayerSpec, ModelSpec, RopeSpec
from headrace.core.weight_shapes import (
    attention_shapes,
    core_shapes,
    dense_shapes,
    expert_shapes,
    norm_shapes,
    router_shapes,
)
from headrace.formats.base import PackedTensor
from headrace.layers.attention import Attention, AttentionShape, AttentionWeights
from headrace.layers.dense import DenseFeedForward
from headrace.layers.linear import Linear
from headrace.layers.moe import InMemoryExperts, Mixture, MixtureExecutor
from headrace.layers.norm import Norm
from headrace.layers.rope import build_rope_table
from headrace.layers.router import Router
from headrace.machine.device import Device
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.expert_weights import ExpertReader
from headrace.models.weights import WeightSource
from headrace.ops.records import Activation, ExpertWeights, RopeTable
from headrace.ops.registry import OpSet

# Makes what computes the experts out of those of every mixture, in order. They are views into the
# checkpoint on the host, valid as long as the factory or its product holds them.
ExecutorFactory = Callable[[ModelSpec, Sequence[ExpertWeights]], MixtureExecutor]


def load_model(
    checkpoint: Checkpoint,
    ops: OpSet,
    device: Device,
    *,
    max_positions: int | None = None,
    dense_format: str | None = None,
    executor_factory: ExecutorFactory | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Decoder:
    """Build the decoder.

    Args:
        checkpoint: opened and checked.
        ops: the operations that the decoder calls.
        device: where the weights go; on the host they stay where they are mapped.
        max_positions: rows of the rotary table; the model's whole context if None.
        dense_format: f32, f16 or bf16: matrices are converted to it once, those of experts too unless
            there is an executor_factory; ``packed``: blocks stay (``weights.to_packed``), and experts without
            a factory become bf16; None leaves them as stored.
        executor_factory: takes the experts, left where they are mapped; None: they go to the device
            with everything else.
        progress: called with ("weights", fraction done) after every layer.

    Raises:
        CheckpointError: a weight is missing, has a wrong shape, or has no place in the model.
    """
    spec = _tied_as_stored(checkpoint)
    source = WeightSource(checkpoint, device.torch_device, dense_format)
    positions = max_positions or spec.max_context
    shapes = core_shapes(spec)
    embed = source.matrix("embed", shapes["embed"])
    if spec.tie_embeddings:
        source.skip("lm_head")  # some files carry the tied matrix twice
        lm_head = embed
    else:
        lm_head = source.matrix("lm_head", shapes["lm_head"])
    divisors = None
    if source.has("rope_freqs"):
        divisors = source.small("rope_freqs", (spec.rope.dim // 2,)).cpu()
    tables = {
        rope: build_rope_table(
            rope or spec.rope,
            positions,
            interleaved=checkpoint.rope_interleaved,
            divisors=divisors if rope is None else None,
            device=device.torch_device,
        )
        for rope in {layer.rope for layer in spec.layers}
    }
    builder = _LayerBuilder(checkpoint, source, spec, ops, tables)
    builder.make_executor(executor_factory)
    layers: list[DecoderLayer] = []
    for index in range(spec.num_layers):
        layers.append(builder.layer(index))
        if progress is not None:
            progress("weights", (index + 1) / spec.num_layers)
    final_norm = builder.norm("final_norm", shapes["final_norm"])
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
        tables: Mapping[RopeSpec | None, RopeTable],
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._spec = spec
        self._ops = ops
        self._tables = tables
        offset = checkpoint.family.hf_norm_offset
        self._norm_offset = 0.0 if checkpoint.kind == "gguf" else offset
        self._act = Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit)
        self._mixtures = [i for i, layer in enumerate(spec.layers) if layer.moe]
        self._executor: MixtureExecutor | None = None

    def make_executor(self, factory: ExecutorFactory | None) -> None:
        """Hand the experts of all mixtures to what will compute them."""
        moe = self._spec.moe
        if moe is None or not self._mixtures:
            return
        source = self._source.for_experts() if factory is None else self._source.on_host()
        reader = ExpertReader(self._checkpoint, source, moe, expert_shapes(self._spec, moe))
        experts = [reader.read(f"layers.{i}.") for i in self._mixtures]
        if factory is None:
            self._executor = InMemoryExperts(self._ops, experts, self._act)
        else:
            self._executor = factory(self._spec, experts)

    def layer(self, index: int) -> DecoderLayer:
        spec, prefix = self._spec, f"layers.{index}."
        self._source.skip(prefix + "rope_inv_freq")
        return DecoderLayer(
            self._ops,
            self._norm(prefix, "attn_norm"),
            self._attention(prefix, spec.layers[index]),
            self._norm(prefix, "ffn_norm"),
            self._mixture(index, prefix) if spec.layers[index].moe else self._dense(prefix),
        )

    def norm(self, name: str, shape: tuple[int, ...]) -> Norm:
        return Norm(self._ops, self._norm_weight(name, shape), self._spec.norm_eps)

    def _norm_weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = self._source.small(name, shape)
        return weight + self._norm_offset if self._norm_offset else weight

    def _norm(self, prefix: str, name: str) -> Norm:
        return self.norm(prefix + name, norm_shapes(self._spec)[name])

    def _attention(self, prefix: str, layer: LayerSpec) -> Attention:
        spec, source = self._spec, self._source
        shapes = attention_shapes(spec)

        def matrix(name: str) -> PackedTensor:
            return source.matrix(prefix + name, shapes[name])

        def small(name: str) -> torch.Tensor | None:
            return source.small(prefix + name, shapes[name]) if name in shapes else None

        def norm(name: str) -> torch.Tensor | None:
            return self._norm_weight(prefix + name, shapes[name]) if name in shapes else None

        weights = AttentionWeights(
            q=matrix("q"),
            k=matrix("k"),
            v=matrix("v"),
            o=matrix("o"),
            q_bias=small("q_bias"),
            k_bias=small("k_bias"),
            v_bias=small("v_bias"),
            o_bias=small("o_bias"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            sinks=small("sinks"),
        )
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, layer.window)
        return Attention(
            self._ops,
            weights,
            shape,
            self._tables[layer.rope],
            spec.norm_eps,
            post_norm=self._post_norm(prefix, "attn_post_norm"),
            scale=spec.attention_scale,
        )

    def _post_norm(self, prefix: str, name: str) -> Norm | None:
        return self._norm(prefix, name) if self._spec.post_norms else None

    def _dense(self, prefix: str) -> DenseFeedForward:
        gate, up, down = (
            self._source.matrix(prefix + name, shape)
            for name, shape in dense_shapes(self._spec).items()
        )
        post_norm = self._post_norm(prefix, "ffn_post_norm")
        return DenseFeedForward(self._ops, gate, up, down, self._act, post_norm)

    def _mixture(self, index: int, prefix: str) -> Mixture:
        moe = self._spec.moe
        if moe is None or self._executor is None:
            raise InternalError(f"layer {index} is a mixture, but the model has no MoeSpec")
        shapes = router_shapes(self._spec, moe)
        matrix = self._source.small(prefix + "router", shapes["router"])
        bias = None
        if "router_bias" in shapes:
            bias = self._source.small(prefix + "router_bias", shapes["router_bias"])
        linear = Linear(self._ops, PackedTensor("f32", tuple(matrix.shape), {"data": matrix}), bias)
        router = Router(self._ops, linear, moe)
        return Mixture(index, self._mixtures.index(index), router, self._executor)
