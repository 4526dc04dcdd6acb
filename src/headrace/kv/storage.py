"""The memory of the KV cache: tensors for each layer, whose pages are touched on first use."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import torch

from headrace.core.errors import DoesNotFitError, InternalError
from headrace.core.kv_formats import FORMATS, KEY_GROUP, KVFormat, PoolShape, pool_nbytes
from headrace.core.model_spec import ModelSpec
from headrace.kv.open_pages import OpenPages
from headrace.ops.records import LayerCache, LayerKV, SealedKV

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def allocate_kv(
    spec: ModelSpec,
    num_blocks: int,
    block_tokens: int,
    kv_format: str,
    device: torch.device,
) -> list[LayerKV]:
    """Reserve a plain cache of every layer: keys and values [num_blocks, Hkv, block_tokens, hd].

    Nothing is written, so on the host a page becomes resident when its first token is stored; the
    content before that is arbitrary. Layers with a sliding window keep all of their pages too.

    Raises:
        DoesNotFitError: the system does not grant the memory.
    """
    shape = (num_blocks, spec.num_kv_heads, block_tokens, spec.head_dim)
    dtype = DTYPES[kv_format]
    caches: list[LayerKV] = []

    def layer(_: int) -> None:
        keys = torch.empty(shape, dtype=dtype, device=device)
        caches.append(LayerKV(keys, torch.empty(shape, dtype=dtype, device=device)))

    nbytes = spec.kv_nbytes_per_token(dtype.itemsize) * num_blocks * block_tokens
    _each_layer(spec, layer, f"{num_blocks * block_tokens} tokens", nbytes, kv_format)
    return caches


def allocate_cache(
    spec: ModelSpec,
    pool: PoolShape,
    kv_format: str,
    device: torch.device,
    directions: torch.Tensor | None = None,
) -> Sequence[LayerCache]:
    """Reserve the cache of every layer in any format; ``allocate_kv`` has what else holds.

    directions: float32 [layers, Hkv, R, hd], the residual directions of formats that have them

    Raises:
        DoesNotFitError: the system does not grant the memory.
    """
    made = FORMATS[kv_format]
    if not made.sealed:
        return allocate_kv(spec, pool.num_blocks, pool.block_tokens, kv_format, device)
    rank = directions.shape[2] if directions is not None and made.max_rank else 0
    heads, size, dim = spec.num_kv_heads, pool.block_tokens, spec.head_dim
    pages = (pool.num_blocks, heads)
    caches: list[SealedKV] = []
    opened: list[torch.Tensor] = []

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def layer(index: int) -> None:
        if not opened:
            rows = pool.num_shared + spec.num_layers * pool.num_own
            opened.extend(empty(torch.bfloat16, rows, heads, size, dim) for _ in range(2))
        nvfp4 = made.keys == "nvfp4"
        columns = dim // 2 if nvfp4 else dim
        along = None if directions is None or not rank else directions[index, :, :rank]
        caches.append(
            SealedKV(
                key_codes=empty(torch.uint8, *pages, size, columns),
                key_scales=empty(torch.uint8, *pages, size, dim // KEY_GROUP) if nvfp4 else None,
                key_residuals=empty(torch.uint8, *pages, size, rank) if rank else None,
                key_refs=empty(torch.bfloat16, *pages, dim) if made.centred else None,
                value_codes=empty(torch.uint8, *pages, dim, size),
                page_scales=empty(torch.float32, *pages, 2),
                first_keys=_first_keys(made, pool, heads, dim, device),
                directions=None if along is None else along.to(device).contiguous(),
                open_keys=opened[0],
                open_values=opened[1],
                num_shared=pool.num_shared,
                open_offset=index * pool.num_own,
            )
        )

    nbytes = cache_nbytes(spec, pool, kv_format, rank)
    _each_layer(spec, layer, f"{pool.num_blocks * size} tokens", nbytes, kv_format)
    return caches


def _first_keys(
    made: KVFormat, pool: PoolShape, heads: int, dim: int, device: torch.device
) -> torch.Tensor | None:
    if not made.first_tokens:
        return None
    shape = (pool.num_first, heads, made.first_tokens, dim)
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def cache_nbytes(spec: ModelSpec, pool: PoolShape, kv_format: str, rank: int = 0) -> int:
    """Bytes of the whole cache, worked out beforehand."""
    return pool_nbytes(
        FORMATS[kv_format],
        pool,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rank=rank if FORMATS[kv_format].max_rank else 0,
    )


def num_blocks_of(cache: LayerCache) -> int:
    """Blocks of a layer's pool."""
    return (cache.keys if isinstance(cache, LayerKV) else cache.key_codes).shape[0]


def allocated_nbytes(caches: Sequence[LayerCache]) -> int:
    """Bytes that the caches' tensors hold, each storage counted once."""
    found: dict[int, int] = {}
    for cache in caches:
        for part in vars(cache).values():
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def open_pages_of(
    caches: Sequence[LayerCache], is_owned: Callable[[int], bool]
) -> OpenPages | None:
    """The allocator of the caches' open pages, None where pages are not sealed."""
    cache = caches[0] if caches else None
    if not isinstance(cache, SealedKV):
        return None
    num_own = (cache.open_keys.shape[0] - cache.num_shared) // len(caches)
    return OpenPages(cache.num_shared, num_own, cache.block_tokens, is_owned)


def copy_block(
    caches: Sequence[LayerCache], source: int, target: int, open_pages: OpenPages | None = None
) -> None:
    """Copy one block's keys and values in every layer; a block of sealed pages is not full yet."""
    slots = None if open_pages is None else open_pages.copy(source, target)
    for cache in caches:
        if isinstance(cache, LayerKV):
            cache.keys[target] = cache.keys[source]
            cache.values[target] = cache.values[source]
            continue
        if slots is None:
            raise InternalError(f"block {source} is copied without its open page")
        # Blocks that outlive a step have slots of the layer's own.
        origin, place = (slot + cache.open_offset for slot in slots)
        cache.open_keys[place] = cache.open_keys[origin]
        cache.open_values[place] = cache.open_values[origin]


def _each_layer(
    spec: ModelSpec, allocate: Callable[[int], None], what: str, nbytes: int, kv_format: str
) -> None:
    for index in range(spec.num_layers):
        try:
            allocate(index)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            smaller = "nvfp4k-fp8v" if kv_format != "f32" else "bf16"
            raise DoesNotFitError(
                f"the KV cache of {what} ({nbytes / 1e6:.0f} MB in {kv_format}) could not be "
                f"allocated: layer {index} of {spec.num_layers} failed",
                hint=f"give a smaller --context or --ram-budget, or --kv-format {smaller}",
            ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python says that memory was not granted."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # a file could not be mapped
    # torch's host allocator raises a plain RuntimeError, with either of two wordings
    # (c10/core/CPUAllocator); CUDA says the last where it does not get pages to lock.
    text = str(error)
    wordings = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(wording in text for wording in wordings)
