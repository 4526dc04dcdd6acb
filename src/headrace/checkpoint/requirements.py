"""Which tensors a model needs, in which shapes: a checkpoint is checked against its spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.checkpoint.names import NameMap
from headrace.checkpoint.records import RawTensor
from headrace.core.errors import CheckpointError
from headrace.core.model_spec import ModelSpec, MoeSpec
from headrace.core.weight_shapes import (
    attention_shapes,
    core_shapes,
    dense_shapes,
    expert_shapes,
    norm_shapes,
    router_shapes,
)
from headrace.core.words import counted

Shapes = dict[str, tuple[int, ...]]

# The loader reads it where it is there: divisors of RoPE's frequencies.
OPTIONAL = ("rope_freqs",)
_FLOATS = ("f32", "f16", "bf16")
# How many names an error lists before it counts the rest.
_LISTED = 5


def check_tensors(
    tensors: Mapping[str, RawTensor],
    spec: ModelSpec,
    names: NameMap,
    path: Path,
    *,
    transposed_experts: bool = False,
) -> None:
    """Check that ``tensors`` are the model's: none missing, none too many, every shape right.

    Args:
        tensors: by canonical name.
        names: how the files call them, for messages.
        path: the checkpoint, for messages.
        transposed_experts: stacked experts in f32, f16 or bf16 are stored [experts, in, out].

    Raises:
        CheckpointError: names the tensor, what was found and what the configuration expects.
    """
    expected = dict(_expected(spec, tensors))
    missing = [n for n in expected if n not in tensors]
    if missing:
        listed = ", ".join(names.stored(n) for n in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise CheckpointError(
            f"{path}: {counted(len(missing), 'tensor is', 'tensors are')} missing: {listed}{more}",
            hint="the download is incomplete, or config.json belongs to another model",
        )
    for name, raw in tensors.items():
        shape = expected.get(name)
        if name in OPTIONAL:
            shape = (spec.rope.dim // 2,)
        if shape is None:
            raise CheckpointError(
                f"{raw.source}: the model has no place for this tensor ({name})",
                hint="the configuration and the weights belong to different models",
            )
        if transposed_experts and raw.format in _FLOATS and ".experts." in name:
            shape = (shape[0], *reversed(shape[1:]))
        if raw.shape != shape:
            raise CheckpointError(
                f"{raw.source}: shape {list(raw.shape)}, expected {list(shape)} from the "
                "configuration",
                hint="the configuration and the weights belong to different models",
            )


def _expected(
    spec: ModelSpec, tensors: Mapping[str, RawTensor]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical names and shapes; experts in whichever way the file stores them."""
    yield from core_shapes(spec).items()
    every = {**norm_shapes(spec), **attention_shapes(spec)}
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}."
        shapes = dict(every)
        if not layer.moe:
            shapes |= dense_shapes(spec)
        elif spec.moe is not None:
            shapes |= router_shapes(spec, spec.moe)
            shapes |= _experts(spec, spec.moe, prefix, tensors)
        for name, shape in shapes.items():
            yield prefix + name, shape


def _experts(
    spec: ModelSpec, moe: MoeSpec, prefix: str, tensors: Mapping[str, RawTensor]
) -> Shapes:
    shapes: Shapes = expert_shapes(spec, moe)
    for kind in ("", "_bias"):
        if prefix + "experts.gate_up" + kind in tensors:
            gate = shapes.pop("experts.gate" + kind)
            del shapes["experts.up" + kind]
            shapes["experts.gate_up" + kind] = (gate[0], 2 * gate[1], *gate[2:])
    for name in ("gate", "up", "down"):
        one = f"experts.{{}}.{name}"
        if prefix + f"experts.{name}" not in tensors and prefix + one.format(0) in tensors:
            shape = shapes.pop(f"experts.{name}")
            # An expert count beyond the number of tensors is wrong anyway; do not count up to it.
            for expert in range(min(shape[0], len(tensors) + 1)):
                shapes[one.format(expert)] = shape[1:]
    return shapes
