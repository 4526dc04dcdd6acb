"""A decoder of a model's shapes and formats whose weights are nobody's: steps are timed on it beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from headrace.checkpoint.records import Checkpoint, RawTensor, TextSource
from headrace.core.families import families
from headrace.core.model_spec import LayerSpec, ModelSpec
from headrace.core.weight_shapes import (
    attention_shapes,
    core_shapes,
    dense_shapes,
    expert_shapes,
    norm_shapes,
    router_shapes,
)
from headrace.explain.running_cost import RunningModel
from headrace.formats.base import PackedTensor, load_formats
from headrace.machine.device import HostDevice
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops.registry import OpSet

# A byte whose pattern is a harmless number in every format's scales: 1.06 as two of them in float16,
# 2^-67 as an exponent, 0.5 in E4M3.
FILLING = 60
_TWO_BYTES = (torch.bfloat16, torch.float16)


def packed(name: str, rows: int, cols: int, device: torch.device | None = None) -> PackedTensor:
    """A matrix of format ``name`` whose bytes are all written, so that they lie in memory."""
    layout = load_formats()[name].layout((rows, cols))
    parts = {
        part: torch.full(
            want.shapes[0],
            FILLING if want.dtype is torch.uint8 else 0.5,
            dtype=want.dtype,
            device=device,
        )
        for part, want in layout.items()
    }
    return PackedTensor(name, (rows, cols), parts)


def stand_in(model: RunningModel, ops: OpSet, layers: int, positions: int) -> Decoder:
    """The model's first ``layers`` layers, all of them without a window, on the host.

    The loader builds it, so that its steps make the same calls. Of each mixture as many experts as a
    token takes have weights of their own, and the others share the first one's.

    Args:
        positions: rows of the rotary table.
    """
    spec = replace(
        model.spec,
        layers=tuple(LayerSpec(None, one.moe, one.rope) for one in model.spec.layers[:layers]),
    )
    tensors = {tensor.name: tensor for tensor in _tensors(spec, model)}
    checkpoint = Checkpoint(
        ref="stand-in", path=Path("stand-in"), kind="safetensors", config={},
        family=families()[spec.family], spec=spec, tensors=tensors, text=TextSource(), nbytes=0,
    )  # fmt: skip
    return load_model(checkpoint, ops, HostDevice(), max_positions=positions)


def _tensors(spec: ModelSpec, model: RunningModel) -> Iterator[RawTensor]:
    for name, shape in core_shapes(spec).items():
        yield _raw(name, shape, model)
    for index, layer in enumerate(spec.layers):
        shapes = attention_shapes(spec) | norm_shapes(spec)
        if not layer.moe:
            shapes |= dense_shapes(spec)
        elif spec.moe is not None:
            shapes |= router_shapes(spec, spec.moe)
        prefix = f"layers.{index}."
        for name, shape in shapes.items():
            yield _raw(name, shape, model, prefix)
        if layer.moe:
            yield from _experts(spec, model, prefix)


def _experts(spec: ModelSpec, model: RunningModel, prefix: str) -> Iterator[RawTensor]:
    moe = spec.moe
    assert moe is not None
    for name, shape in expert_shapes(spec, moe).items():
        if len(shape) == 2:  # biases stay stacked
            yield _raw(name, shape, model, prefix)
            continue
        side = name.split(".")[1]
        own = [_raw("expert", shape[1:], model, prefix) for _ in range(moe.num_experts_per_token)]
        for expert in range(moe.num_experts):
            source = own[expert] if expert < len(own) else own[0]
            yield replace(source, name=f"{prefix}experts.{expert}.{side}")


def _raw(name: str, shape: tuple[int, ...], model: RunningModel, prefix: str = "") -> RawTensor:
    """A matrix as the model stores its kind; what has no kind is float32."""
    stored = model.matrices.get(name) if name != "router" else None
    if stored is None or len(shape) != 2:
        weight = PackedTensor("f32", shape, {"data": torch.full(shape, 0.5)})
    else:
        weight = packed(stored.format, *shape)
    parts = {part: _as_stored(data) for part, data in weight.parts.items()}
    return RawTensor(prefix + name, weight.format, shape, parts, "stand-in")


def _as_stored(data: torch.Tensor) -> npt.NDArray[Any]:
    """Two-byte floats as their bits, as checkpoints have them."""
    return (data.view(torch.uint16) if data.dtype in _TWO_BYTES else data).numpy()
