"""The memory of the KV cache: two tensors for each layer, whose pages are touched on first use."""

from __future__ import annotations

import torch

from headrace.core.errors import DoesNotFitError
from headrace.core.model_spec import ModelSpec
from headrace.ops.records import LayerKV

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def allocate_kv(
    spec: ModelSpec,
    num_blocks: int,
    block_tokens: int,
    kv_format: str,
    device: torch.device,
) -> list[LayerKV]:
    """Reserve the cache of every layer: keys and values [num_blocks, Hkv, block_tokens, hd].

    Nothing is written, so on the host a page becomes resident when its first token is stored; the
    content before that is arbitrary. Layers with a sliding window keep all of their pages too.

    Raises:
        DoesNotFitError: the system does not grant the memory.
    """
    shape = (num_blocks, spec.num_kv_heads, block_tokens, spec.head_dim)
    dtype = DTYPES[kv_format]
    caches: list[LayerKV] = []
    try:
        for _ in spec.layers:
            keys = torch.empty(shape, dtype=dtype, device=device)
            caches.append(LayerKV(keys, torch.empty(shape, dtype=dtype, device=device)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        nbytes = spec.kv_nbytes_per_token(dtype.itemsize) * num_blocks * block_tokens
        raise DoesNotFitError(
            f"the KV cache of {num_blocks * block_tokens} tokens ({nbytes / 1e6:.0f} MB in "
            f"{kv_format}) could not be allocated: layer {len(caches)} of {spec.num_layers} failed",
            hint="give a smaller --context or --ram-budget, or --kv-format bf16",
        ) from error
    return caches


def copy_block(caches: list[LayerKV], source: int, target: int) -> None:
    """Copy one block's keys and values in every layer."""
    for cache in caches:
        cache.keys[target] = cache.keys[source]
        cache.values[target] = cache.values[source]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python says that memory was not granted."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's host allocator raises a plain RuntimeError; its two wordings (c10/core/CPUAllocator)
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "not enough memory" in text
    )
