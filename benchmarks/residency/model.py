"""Decoders with random dense weights, around any mixture executor, and the gpt-oss-120b geometry."""

from __future__ import annotations

import torch

from benchmarks.residency import geometry as geo
from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.formats.base import PackedTensor
from headrace.layers.attention import Attention, AttentionShape, AttentionWeights
from headrace.layers.dense import DenseFeedForward
from headrace.layers.linear import Linear
from headrace.layers.moe import Mixture, MixtureExecutor
from headrace.layers.norm import Norm
from headrace.layers.rope import build_rope_table
from headrace.layers.router import Router
from headrace.machine.device import Device
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.ops.records import Activation
from headrace.ops.registry import OpSet

CONTEXT = 16_384


def spec(layers: int) -> ModelSpec:
    return ModelSpec(
        family="gpt_oss",
        hidden=geo.HIDDEN,
        num_heads=geo.HEADS,
        num_kv_heads=geo.KV_HEADS,
        head_dim=geo.HEAD_DIM,
        vocab=geo.VOCAB,
        intermediate=geo.INTERMEDIATE,
        norm_eps=1e-5,
        rope=RopeSpec(150_000.0, geo.HEAD_DIM, "yarn", 32.0, 4096, truncate=False),
        max_context=131_072,
        tie_embeddings=False,
        layers=tuple(LayerSpec(None if i % 2 else geo.WINDOW, True) for i in range(layers)),
        moe=MoeSpec(
            geo.EXPERTS, geo.TOP_K, geo.INTERMEDIATE, "topk_softmax", False, True, True, True
        ),
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        activation="swiglu_clamped",
    )


def build(
    of: ModelSpec,
    ops: OpSet,
    device: Device,
    executor: MixtureExecutor | None,
    context: int = CONTEXT,
) -> Decoder:
    """Matrices are bfloat16 with deviation 1 / sqrt(columns), routers float32; an embedding of its own stays
    in pinned RAM, since a step needs a row of it.

    executor: of the mixtures; None where there are none.
    """
    target = device.torch_device
    generator = torch.Generator(target).manual_seed(3)

    def matrix(rows: int, cols: int) -> PackedTensor:
        data = torch.empty(rows, cols, dtype=torch.bfloat16, device=target)
        data.normal_(0.0, cols**-0.5, generator=generator)
        return PackedTensor("bf16", (rows, cols), {"data": data})

    def vector(size: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(size, device=target, generator=generator) * scale

    def norm() -> Norm:
        return Norm(ops, torch.ones(of.hidden, device=target), of.norm_eps)

    def mixture(index: int) -> Mixture:
        assert of.moe is not None
        assert executor is not None
        rows = torch.randn(of.moe.num_experts, of.hidden, device=target, generator=generator)
        packed = PackedTensor("f32", tuple(rows.shape), {"data": rows * of.hidden**-0.5})
        linear = Linear(ops, packed, vector(of.moe.num_experts))
        return Mixture(index, index, Router(ops, linear, of.moe), executor)

    def dense() -> DenseFeedForward:
        sides = [matrix(of.intermediate, of.hidden) for _ in range(2)]
        down = matrix(of.hidden, of.intermediate)
        return DenseFeedForward(ops, *sides, down, Activation(of.activation))

    def embedding() -> PackedTensor:
        data = device.pinned(of.vocab, of.hidden, dtype=torch.bfloat16)
        step = 16_384
        for start in range(0, of.vocab, step):
            rows = data[start : start + step]
            rows.copy_(torch.randn(rows.shape, device=target, generator=generator).bfloat16())
        return PackedTensor("bf16", (of.vocab, of.hidden), {"data": data})

    table = build_rope_table(of.rope, context, device=target)
    queries, keys = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
    layers: list[DecoderLayer] = []
    for index, layer in enumerate(of.layers):
        biases = (vector(n) for n in (queries, keys, keys, of.hidden)) if of.qkv_bias else ()
        weights = AttentionWeights(
            matrix(queries, of.hidden),
            matrix(keys, of.hidden),
            matrix(keys, of.hidden),
            matrix(of.hidden, queries),
            *biases,
            sinks=vector(of.num_heads, 1.0) if of.sinks else None,
        )
        shape = AttentionShape(of.num_heads, of.num_kv_heads, of.head_dim, layer.window)
        attention = Attention(ops, weights, shape, table, of.norm_eps)
        feed_forward = mixture(index) if layer.moe else dense()
        layers.append(DecoderLayer(ops, norm(), attention, norm(), feed_forward))
    embed = None if of.tie_embeddings else embedding()
    head = matrix(of.vocab, of.hidden)
    return Decoder(of, ops, head if embed is None else embed, layers, norm(), head, context)
