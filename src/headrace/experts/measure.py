"""The CPU's expert kernel as a load: random experts of a large model, as fast as they can be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from headrace.core.numeric import FORMATS
from headrace.experts.random_store import random_store
from headrace.experts.slab import SlabLayout, slab_layout
from headrace.experts.slab_pack import slice_weights
from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.registry import OpSet, set_num_threads

ExpertLoad = Callable[[int, float], float]  # threads, seconds -> GB/s

# gpt-oss's experts, and the nearest size whose rows are whole blocks of 256.
_SIZE, _SIZE_256 = 2880, 3072
_STORE_NBYTES = (
    1 << 30
)  # several times the largest last-level caches, made in a fraction of a second
_EXPERTS_AT_ONCE = 4  # of one token, about as many as a token's misses
FORMATS_MEASURED = ("mxfp4", "bf16", "fp8_e4m3", "q8_0", "q4_k")


def expert_loads(
    ops: OpSet, *, threads: int, formats: Sequence[str] = FORMATS_MEASURED
) -> dict[str, Callable[[], AbstractContextManager[ExpertLoad]]]:
    """For each format, what opens its load. ``threads``: to make the experts with."""
    return {fmt: partial(open_load, ops, fmt, threads) for fmt in formats}


@contextmanager
def open_load(
    ops: OpSet, fmt: str, threads: int, store_nbytes: int = _STORE_NBYTES
) -> Generator[ExpertLoad, None, None]:
    """Random experts in memory for as long as the context lasts."""
    size = _SIZE_256 if FORMATS[fmt].block_weights > 32 else _SIZE
    layout = slab_layout(fmt, size, size, has_bias=False)
    num_experts = max(_EXPERTS_AT_ONCE, store_nbytes // layout.slab_nbytes)
    store = random_store(layout, 1, num_experts, seed=1, threads=threads)
    try:
        yield _load(ops, layout, store.tensor(0))
    finally:
        store.close()


def _load(ops: OpSet, layout: SlabLayout, slabs: torch.Tensor) -> ExpertLoad:
    pieces = [slice_weights(slab, layout, s) for slab in slabs for s in range(layout.num_slices)]

    def every(name: str) -> list[PackedTensor]:
        return [getattr(piece, name)[0] for piece in pieces]

    # Each slice as an expert of its own: the same bytes, the same kernel.
    experts = ExpertWeights(every("gate"), every("up"), every("down"))
    picked = _EXPERTS_AT_ONCE * layout.num_slices
    nbytes = _EXPERTS_AT_ONCE * layout.num_slices * sum(p.nbytes for p in layout.parts)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, layout.hidden, generator=generator)
    weights = torch.full((1, picked), 1 / picked)
    act = Activation()
    # Experts in random order, all slices of one after each other, as decoding touches them.
    order = [int(e) for e in torch.randperm(len(slabs), generator=generator)]
    at = [0]

    def one() -> None:
        chosen = [order[(at[0] + i) % len(order)] for i in range(_EXPERTS_AT_ONCE)]
        at[0] = (at[0] + _EXPERTS_AT_ONCE) % len(order)
        ids = [e * layout.num_slices + s for e in chosen for s in range(layout.num_slices)]
        ops.moe(x, torch.tensor([ids], dtype=torch.int32), weights, experts, act)

    def load(threads: int, seconds: float) -> float:
        set_num_threads(threads)
        one()
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            one()
            calls += 1
        return calls * nbytes / (time.perf_counter() - start) / 1e9

    return load
