#!/usr/bin/env python3
"""Make a dense model into a mixture of experts whose output is known: the dense model's.

    PYTHONPATH=src python scripts/split_dense_into_mixture.py SmolLM2.gguf out.gguf [--ffn mxfp4] [--layers N]
        [--dense dense.gguf]

The intermediate dimension of every feed-forward is cut into 8 slices, and each slice becomes two equal
experts out of 16, in an order that differs from layer to layer. Router rows come as pairs +r and -r, one
for each copy of a slice, so that for every token exactly one of the two has a positive score: the top 8
are one copy of each slice. Rows have length 2^-20, so the weights are 1/8 but for 1e-6. Down projections
are times 8, an exact change of their scales. So experts differ, routing depends on the data, every weight
has the bytes of the dense model, and the output is the dense model's, whatever computes it and wherever
the experts lie: an oracle for placement with real text. (GGUF calls Mixtral's architecture "llama" with an
expert count, which is what this writes. There is no q or k norm in either.)

``--ffn`` first converts the feed-forward, and ``--dense`` writes the dense model with it: their outputs
are to be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint, RawTensor
from headrace.core.model_spec import MoeSpec
from headrace.core.numeric import FORMATS
from headrace.formats.base import PackedTensor, dequantize, format_of

NUM_SLICES = 8
COPIES = 2
NUM_EXPERTS = NUM_SLICES * COPIES
ROUTER_LENGTH = 2.0**-20
# Bytes of a block that are half-precision factors of all its weights.
_HALF_AT = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,)}

Parts = Mapping[str, npt.NDArray[Any]]


def split(source: Checkpoint, *, seed: int = 0) -> Checkpoint:
    """The mixture of a dense checkpoint, in memory, its experts in ``expert_order``."""
    spec = source.spec
    if spec.moe is not None or spec.intermediate % (NUM_SLICES * 32):
        raise SystemExit(
            f"{source.ref}: expected a dense model whose intermediate size is a multiple of "
            f"{NUM_SLICES * 32}, found {spec.intermediate}"
        )
    width = spec.intermediate // NUM_SLICES
    tensors = {n: t for n, t in source.tensors.items() if not _is_ffn(n)}
    for layer in range(spec.num_layers):
        order = expert_order(layer, seed)
        for name in ("gate", "up", "down"):
            dense = source.tensors[f"layers.{layer}.{name}"]
            cut = _down if name == "down" else _rows
            slices = [cut(dense, s * width, width) for s in range(NUM_SLICES)]
            of = np.argsort(order) // COPIES  # the slice of each expert
            key = f"layers.{layer}.experts.{name}"
            tensors[key] = RawTensor(
                key,
                dense.format,
                (NUM_EXPERTS, *slices[0][0]),
                {k: np.stack([slices[s][1][k] for s in of]) for k in slices[0][1]},
                f"slices of {dense.source}",
            )
        key = f"layers.{layer}.router"
        rows = router_rows(layer, spec.hidden, seed)
        tensors[key] = RawTensor(key, "f32", rows.shape, {"data": rows}, "split_dense_into_mixture")
    return replace(
        source,
        tensors=tensors,
        spec=replace(
            spec,
            intermediate=width,
            layers=tuple(replace(one, moe=True) for one in spec.layers),
            moe=MoeSpec(NUM_EXPERTS, NUM_SLICES, width, "softmax_topk", normalize=True),
        ),
    )


def expert_order(layer: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """order[i]: the expert that is copy i % 2 of slice i // 2."""
    return np.random.default_rng((seed, layer)).permutation(NUM_EXPERTS)


def router_rows(layer: int, hidden: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """float32 [16, hidden]: rows +r and -r for the two copies of a slice."""
    rng = np.random.default_rng((seed, layer, 1))
    r = rng.normal(size=(NUM_SLICES, hidden))
    r = (r / np.linalg.norm(r, axis=1, keepdims=True) * ROUTER_LENGTH).astype(np.float32)
    rows = np.empty((NUM_EXPERTS, hidden), np.float32)
    rows[expert_order(layer, seed)] = np.stack([r, -r], 1).reshape(NUM_EXPERTS, hidden)
    return rows


def with_layers(source: Checkpoint, count: int) -> Checkpoint:
    """The first ``count`` layers, as a model of their own."""
    dropped = {f"layers.{i}." for i in range(count, source.spec.num_layers)}
    kept = {
        n: t for n, t in source.tensors.items() if ".".join(n.split(".")[:2]) + "." not in dropped
    }
    return replace(
        source, tensors=kept, spec=replace(source.spec, layers=source.spec.layers[:count])
    )


def with_ffn(source: Checkpoint, fmt: str) -> Checkpoint:
    """The dense model with its feed-forward converted to ``fmt`` ("stored": left alone)."""
    if fmt == "stored":
        return source
    tensors = {n: _convert(t, fmt) if _is_ffn(n) else t for n, t in source.tensors.items()}
    return replace(source, tensors=tensors)


def _is_ffn(name: str) -> bool:
    return name.rpartition(".")[2] in ("gate", "up", "down")


def _convert(raw: RawTensor, fmt: str) -> RawTensor:
    views = {"bf16": torch.bfloat16, "f16": torch.float16}
    parts = {k: torch.from_numpy(v) for k, v in raw.parts.items()}
    if raw.format in views:
        parts = {k: v.view(views[raw.format]) for k, v in parts.items()}
    values = dequantize(PackedTensor(raw.format, raw.shape, parts))
    if fmt in views:
        data = {"data": values.to(views[fmt]).view(torch.uint16).numpy()}
    elif fmt == "f32":
        data = {"data": values.numpy()}
    else:
        quantize = format_of(PackedTensor(fmt, raw.shape)).quantize
        if quantize is None:
            raise SystemExit(f"--ffn {fmt}: there is no encoder for it")
        data = {k: v.numpy() for k, v in quantize(values).parts.items()}
    return RawTensor(raw.name, fmt, raw.shape, data, raw.source)


def _rows(dense: RawTensor, first: int, count: int) -> tuple[tuple[int, int], Parts]:
    """Rows of gate or up: whole, as they are."""
    return (count, dense.shape[1]), {k: v[first : first + count] for k, v in dense.parts.items()}


def _down(dense: RawTensor, first: int, count: int) -> tuple[tuple[int, int], Parts]:
    """Columns of down, times NUM_SLICES."""
    spec = FORMATS[dense.format]
    parts: dict[str, npt.NDArray[Any]] = {}
    for name, data in dense.parts.items():
        per_column = data.shape[1] / dense.shape[1]
        a, b = round(first * per_column), round((first + count) * per_column)
        parts[name] = np.ascontiguousarray(data[:, a:b])
    shape = (dense.shape[0], count)
    if dense.format == "mxfp4":
        _times(parts["scales"], lambda e: e + 3, limit=254 - 3)
    elif dense.format == "mxfp4_gguf":
        blocks = parts["blocks"].reshape(shape[0], -1, spec.block_nbytes)
        _times(blocks[:, :, 0], lambda e: e + 3, limit=254 - 3)
    elif dense.format in _HALF_AT:
        blocks = parts["blocks"].reshape(shape[0], -1, spec.block_nbytes)
        for at in _HALF_AT[dense.format]:
            half = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)
            blocks[:, :, at : at + 2] = _exactly(half, np.float16).view(np.uint8)
    elif dense.format == "bf16":
        wide = (parts["data"].astype(np.uint32) << 16).view(np.float32)
        parts["data"] = (_exactly(wide, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif dense.format == "f16":
        parts["data"] = _exactly(parts["data"].view(np.float16), np.float16).view(np.uint16)
    elif dense.format == "f32":
        parts["data"] = _exactly(parts["data"], np.float32)
    else:
        raise SystemExit(f"{dense.source}: no exact way to scale {dense.format}; give --ffn bf16")
    return shape, parts


def _times(
    exponents: npt.NDArray[Any], change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], limit: int
) -> None:
    if int(exponents.max()) > limit:
        raise SystemExit("a block scale is too large to be multiplied by 8")
    exponents[...] = change(exponents)


def _exactly(values: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    larger = (values * dtype(NUM_SLICES)).astype(dtype)
    if not np.array_equal(larger / dtype(NUM_SLICES), values):
        raise SystemExit("a weight cannot be multiplied by 8 exactly")
    return larger


def write_gguf(checkpoint: Checkpoint, like: Path, out: Path) -> None:
    """Write ``checkpoint`` as a GGUF file with the metadata of ``like``, sizes and experts apart."""
    import gguf

    spec = checkpoint.spec
    writer = gguf.GGUFWriter(out, "llama")
    sizes = {
        "llama.block_count": spec.num_layers,
        "llama.feed_forward_length": spec.intermediate,
        **({} if spec.moe is None else {"llama.expert_count": spec.moe.num_experts}),
        **({} if spec.moe is None else {"llama.expert_used_count": spec.moe.num_experts_per_token}),
    }
    for key, value in sizes.items():
        writer.add_uint32(key, value)
    for key, field in gguf.GGUFReader(like).fields.items():
        if key in sizes or key == "general.architecture" or key.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub = field.types[1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub)
    names = {ours: theirs for theirs, ours in checkpoint.family.gguf_names.items()}
    for name, raw in checkpoint.tensors.items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        ours = name.replace(f"layers.{layer}.", "layers.{i}.") if layer else name
        _add(writer, names[ours].replace("{i}", layer), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, raw: RawTensor) -> None:
    from gguf import GGMLQuantizationType

    if raw.format == "f32":
        writer.add_tensor(name, raw.parts["data"])
        return
    if raw.format == "mxfp4":
        data = _as_gguf_mxfp4(raw)
        number = FORMATS["mxfp4_gguf"].gguf_type
    else:
        (data,) = raw.parts.values()
        number = FORMATS[raw.format].gguf_type
    writer.add_tensor(
        name,
        data.view(np.uint8).reshape(*raw.shape[:-1], -1),
        raw_dtype=GGMLQuantizationType(number),
    )


def _as_gguf_mxfp4(raw: RawTensor) -> npt.NDArray[np.uint8]:
    """Codes and scales apart, pairs 2i and 2i + 1, as blocks with elements j and j + 16."""
    codes = raw.parts["codes"].reshape(*raw.shape[:-1], -1, 16)
    values = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 32)
    joined = values[..., :16] | values[..., 16:] << 4
    return np.concatenate([raw.parts["scales"][..., None], joined], -1).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a dense model of the Llama family, GGUF")
    parser.add_argument("out", type=Path, help="the mixture, GGUF")
    parser.add_argument("--ffn", default="stored", help="format: stored, f32, bf16, f16 or mxfp4")
    parser.add_argument("--layers", type=int, help="keep the first N layers only")
    parser.add_argument(
        "--dense", type=Path, help="also write the dense model with --ffn, --layers"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    source = open_checkpoint(str(args.source))
    if args.layers is not None:
        source = with_layers(source, args.layers)
    dense = with_ffn(source, args.ffn)
    write_gguf(split(dense, seed=args.seed), args.source, args.out)
    if args.dense is not None:
        write_gguf(dense, args.source, args.dense)


if __name__ == "__main__":
    main()
