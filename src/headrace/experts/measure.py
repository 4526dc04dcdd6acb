"""The CPU's expert kernel as a load: requests for random experts of a large model, one after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from headrace.core.numeric import FORMATS
from headrace.experts.prefill import MANY, MANY_TOKENS
from headrace.experts.random_store import random_store
from headrace.experts.request_block import RequestBlock, request_block
from headrace.experts.slab import SlabLayout, slab_layout
from headrace.experts.store import HostStore
from headrace.ops.expert_records import CpuExperts, ServiceOptions
from headrace.ops.records import Activation

Load = Callable[[int, Sequence[int], float], float]  # threads, CPUs, seconds -> GB/s

# gpt-oss's experts, and the nearest size whose rows are whole blocks of 256.
_SIZE, _SIZE_256 = 2880, 3072
_STORE_NBYTES = (
    1 << 30
)  # several times the largest last-level caches, made in a fraction of a second
_EXPERTS_AT_ONCE = 4  # of one token, about as many as a token's misses
_TIMEOUT_S = 10.0
FORMATS_MEASURED = ("mxfp4", "bf16", "fp8_e4m3", "q8_0", "q4_k")


def expert_loads(
    kernels: CpuExperts, *, threads: int, formats: Sequence[str] = FORMATS_MEASURED
) -> dict[str, Callable[[], AbstractContextManager[Load]]]:
    """For each format, what opens its load: experts of one token each, and by the name with ``MANY`` of many.

    ``threads``: to make the experts with.
    """
    loads: dict[str, Callable[[], AbstractContextManager[Load]]] = {}
    for suffix, tokens in (("", 1), (MANY, MANY_TOKENS)):
        for fmt in formats:
            loads[fmt + suffix] = partial(open_load, kernels, fmt, threads, tokens=tokens)
    return loads


@contextmanager
def open_load(
    kernels: CpuExperts,
    fmt: str,
    threads: int,
    store_nbytes: int = _STORE_NBYTES,
    tokens: int = 1,
) -> Generator[Load, None, None]:
    """Random experts in memory for as long as the context lasts, each of so many tokens.

    A load's rate is bytes of slices over the time between request and answer, as the engine asks.
    """
    size = _SIZE_256 if FORMATS[fmt].block_weights > 32 else _SIZE
    layout = slab_layout(fmt, size, size, has_bias=False)
    num_experts = max(_EXPERTS_AT_ONCE, store_nbytes // layout.slab_nbytes)
    store = random_store(layout, 1, num_experts, seed=1, threads=threads)
    try:
        yield _load(kernels, store, tokens)
    finally:
        store.close()


def _load(kernels: CpuExperts, store: HostStore, tokens: int) -> Load:
    layout = store.layout
    together = _together(tokens)
    fields = request_block(
        max_tokens=together,
        top_k=_EXPERTS_AT_ONCE,
        num_experts=store.num_experts,
        num_slices=layout.num_slices,
        hidden=layout.hidden,
    )
    raw = torch.zeros(fields.nbytes + 64, dtype=torch.uint8)
    block = raw[-raw.data_ptr() % 64 :][: fields.nbytes]
    x = block[fields.x : fields.x + 4 * together * layout.hidden].view(torch.float32)
    x.normal_(generator=torch.Generator().manual_seed(1))
    order = random.Random(1)

    def load(threads: int, cpus: Sequence[int], seconds: float) -> float:
        # A count below that of all CPUs keeps to its own; otherwise the system places the threads.
        own = tuple(cpus) if len(set(cpus)) == threads else None
        # One thread asks here while another waits for the GPU.
        options = ServiceOptions(threads, own, apart=False)
        block[: fields.items].zero_()  # as a new service expects it
        service = kernels.expert_service(
            [layout], [store.base(0)], store.num_experts, Activation(), block, fields, options
        )
        service.start()
        try:
            spent, calls = 0.0, 0
            for warm in (True, False):
                end = 0.0 if warm else seconds
                spent, calls = 0.0, 0
                while spent <= end:
                    chosen = order.sample(range(store.num_experts), _EXPERTS_AT_ONCE)
                    _ask(block, fields, layout, chosen, tokens)
                    spent += service.request(_TIMEOUT_S)
                    calls += 1
        finally:
            service.stop()
        return calls * _EXPERTS_AT_ONCE * layout.slab_nbytes / spent / 1e9

    return load


def _together(tokens: int) -> int:
    """Tokens of a request whose experts have so many each."""
    return 1 if tokens == 1 else 2 * tokens


def _ask(
    block: torch.Tensor, fields: RequestBlock, layout: SlabLayout, chosen: list[int], tokens: int
) -> None:
    """Write a request for all slices of the chosen experts: of one token, or every second expert of the
    first half of the request's tokens and the others of the second half."""
    rows = [
        [expert, s, i * tokens, tokens]
        for i, expert in enumerate(sorted(chosen))
        for s in range(layout.num_slices)
    ]
    together, pairs = _together(tokens), len(chosen) * tokens
    header = block[fields.header : fields.header + 20].view(torch.int32)
    header.copy_(torch.tensor([0, together, len(rows), pairs, 0], dtype=torch.int32))
    items = block[fields.items : fields.items + 16 * len(rows)].view(torch.int32)
    items.copy_(torch.tensor(rows, dtype=torch.int32).flatten())
    token = block[fields.pair_token : fields.pair_token + 4 * pairs].view(torch.int32)
    token.copy_(torch.arange(pairs, dtype=torch.int32) % together)
    weight = block[fields.pair_weight : fields.pair_weight + 4 * pairs].view(torch.float32)
    weight.fill_(1 / len(chosen))
