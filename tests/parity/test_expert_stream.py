"""Prompt chunks through the ring, the slots and the CPU, against float64; and the warmed cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.experts.cpu_share import DirectShare, ServiceShare
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.host_paths import HostPaths
from headrace.experts.random_store import random_store
from headrace.experts.request_block import request_block
from headrace.experts.slab import slab_layout
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.experts.stream import StreamPrefill
from headrace.machine.device import CudaDevice, HostDevice
from headrace.ops.expert_records import ServiceOptions
from headrace.ops.records import Activation
from headrace.ops.registry import cpu_experts
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.slabs import expert_float64
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 6, 2, 20
ACT = Activation("swiglu_clamped")


@pytest.fixture(scope="module")
def store() -> Iterator[HostStore]:
    layout = slab_layout("mxfp4", 64, 64, has_bias=True, num_slices=2)
    made = random_store(layout, LAYERS, EXPERTS, seed=9, threads=1, pin=DEVICE.type == "cuda")
    yield made
    made.close()


def _chunk(store: HostStore, layer: int, seed: int, experts: int = EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, store.layout.hidden, generator=generator)
    ids = torch.rand(TOKENS, experts, generator=generator).topk(TOP_K).indices.int()
    ids[3] = -1
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    want = np.zeros(x.shape)
    for t, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            if expert >= 0:
                y = expert_float64(
                    store.layout, store.slab(layer, expert), x[t].double().numpy(), ACT
                )
                want[t] += float(weights[t, j]) * y
    return x, ids, weights, want


def _error(found: torch.Tensor, want: np.ndarray) -> float:
    return float(np.abs(found.cpu().numpy() - want).max() / np.abs(want).max())


def _paths(store: HostStore, placement: str, slots: int) -> HostPaths:
    shape = ExecutorShape(placement, 1, TOP_K, slots)
    paths = HostPaths(store, shape.plan_shape(store), ACT)
    HybridExecutor(HostDevice(), store, shape, paths).fill()
    return paths


@pytest.mark.parametrize(("placement", "slots"), [("stream", 7), ("hybrid", 1), ("gpu", 24)])
def test_a_chunk_through_ring_and_slots(store: HostStore, placement: str, slots: int) -> None:
    paths = _paths(store, placement, slots)
    prefill = StreamPrefill(HostDevice(), store, paths.shape, paths, paths.chunk(ACT))
    if placement == "gpu":
        assert paths.shape.max_fetch == 0
    for step in range(3):
        for layer in range(LAYERS):
            x, ids, weights, want = _chunk(store, layer, 10 * step + layer)
            assert _error(prefill(layer, x, ids, weights), want) < 1e-6


@needs_native
@pytest.mark.parametrize(("placement", "share"), [("hybrid", 0.5), ("cpu", 0.0)])
def test_the_cpu_takes_its_share(store: HostStore, placement: str, share: float) -> None:
    paths = _paths(store, placement, 5)
    bases = [store.base(layer) for layer in range(LAYERS)]
    cpu = DirectShare(cpu_experts(), store.layouts, bases, EXPERTS, ACT)
    prefill = StreamPrefill(
        HostDevice(), store, paths.shape, paths, paths.chunk(ACT), cpu=cpu, cpu_share=share
    )
    x, ids, weights, want = _chunk(store, 1, 4)
    assert _error(prefill(1, x, ids, weights), want) < 2e-4
    assert prefill.on_cpu > 0
    assert (prefill.fetched > 0) == (placement == "hybrid")
    if placement == "cpu":  # in pieces, if the CPU takes no more at once
        cpu.max_tokens = 7
        assert _error(prefill(1, x, ids, weights), want) < 2e-4


def test_the_cache_is_warmed_with_what_was_used_and_forgets_only_what_was_not(
    store: HostStore,
) -> None:
    paths = _paths(store, "stream", 8)  # experts 0 and 1 of both layers
    prefill = StreamPrefill(HostDevice(), store, paths.shape, paths, paths.chunk(ACT))
    x, ids, weights, _ = _chunk(store, 0, 1, experts=2)
    used = torch.where(ids >= 0, 1 + 3 * ids, ids)  # experts 1 and 4
    prefill(0, x, used, weights)
    slots = paths.residency()[0].tolist()
    resident = {key // 2 for key, slot in enumerate(slots) if slot >= 0}
    assert resident == {1, 4}
    assert {key // 2 for key, slot in enumerate(paths.residency()[1]) if slot >= 0} == {0, 1}
    for key, slot in enumerate(slots):
        if slot >= 0:
            assert paths.tables.owner_of[slot] == key
            assert torch.equal(paths.slots(slot, 1)[0], store.slab(0, key // 2)[key % 2])
    before = prefill.fetched
    prefill(0, x, used, weights)
    assert prefill.fetched == before, "everything was resident"


SLOW_LINK, FAST_LINK = PathRates(1.0, 500.0, 4096), PathRates(500.0, 1.0, 4096)


class CountingShare(DirectShare):
    """Counts (token, expert) pairs that it is asked for, by slice."""

    pairs = 0

    def begin(self, layer, ids, weights, keys) -> None:
        assert ids.shape[0] <= self.max_tokens
        flat = ids.flatten().tolist()
        self.pairs += sum(flat.count(int(key) // 2) for key in keys)
        super().begin(layer, ids, weights, keys)


class CountingChunk:
    """Counts (token, expert) pairs that the device computes, by slice."""

    def __init__(self, chunk) -> None:
        self._chunk, self.pairs, self.copied = chunk, 0, []

    def begin(self, layer, x, ids, weights) -> None:
        self._ids = ids.flatten().tolist()
        self._chunk.begin(layer, x, ids, weights)

    def stage(self, work, ends) -> None:
        self.pairs += sum(self._ids.count(int(key) // 2) for key in work[:, 1])
        self._chunk.stage(work, ends)

    def compute(self, number: int) -> None:
        self._chunk.compute(number)

    def finish(self) -> torch.Tensor:
        return self._chunk.finish()


@needs_native
@pytest.mark.parametrize(("rates", "both"), [(SLOW_LINK, True), (FAST_LINK, False), (None, False)])
def test_a_long_chunk_is_the_same_on_both_paths_and_streamed(
    store: HostStore, rates: PathRates | None, both: bool
) -> None:
    paths = _paths(store, "hybrid", 9)
    before = [{k for k, slot in enumerate(row) if slot >= 0} for row in paths.residency()]
    bases = [store.base(layer) for layer in range(LAYERS)]
    cpu = CountingShare(cpu_experts(), store.layouts, bases, EXPERTS, ACT)
    cpu.max_tokens = 6  # 20 tokens: 6, 6, 6 and 2
    device = CountingChunk(paths.chunk(ACT))
    prefill = StreamPrefill(HostDevice(), store, paths.shape, paths, device, cpu=cpu, cpu_share=0.5)
    prefill.set_rates(rates)
    assert prefill.takes_both_paths(TOKENS, TOP_K) == both
    assert prefill.takes_both_paths(6, TOP_K)
    pairs = 0
    for step in range(2):
        for layer in range(LAYERS):
            x, ids, weights, want = _chunk(store, layer, 10 * step + layer)
            assert _error(prefill(layer, x, ids, weights), want) < 2e-4
            pairs += 2 * int((ids >= 0).sum())  # slices of an expert
            for key, slot in enumerate(paths.residency()[layer].tolist()):
                if slot >= 0:
                    assert paths.tables.owner_of[slot] == layer * EXPERTS * 2 + key
                    assert torch.equal(
                        paths.slots(slot, 1)[0], store.slab(layer, key // 2)[key % 2]
                    )
    assert device.pairs + cpu.pairs == pairs, "every token's experts once"
    assert (cpu.pairs > 0) == both
    after = [{k for k, slot in enumerate(row) if slot >= 0} for row in paths.residency()]
    lent = 0 if both else 9 // 8
    assert sum(map(len, after)) >= sum(map(len, before)) - lent, "nothing is wiped"
    if both:
        assert [len(row) for row in after] == [len(row) for row in before]


@needs_native
@pytest.mark.parametrize(
    ("placement", "rates"),
    [("hybrid", SLOW_LINK), ("hybrid", FAST_LINK), ("cpu", None), ("stream", None), ("gpu", None)],
)
def test_a_long_chunk_is_added_to_the_rows_it_is_made_from(
    store: HostStore, placement: str, rates: PathRates | None
) -> None:
    """x is the half of each row: in pieces, streamed, on the CPU alone, and all in slots."""
    paths = _paths(store, placement, 24 if placement == "gpu" else 9)
    bases = [store.base(layer) for layer in range(LAYERS)]
    cpu = None
    if placement in ("hybrid", "cpu"):
        cpu = DirectShare(cpu_experts(), store.layouts, bases, EXPERTS, ACT)
        cpu.max_tokens = 6
    prefill = StreamPrefill(
        HostDevice(), store, paths.shape, paths, paths.chunk(ACT), cpu=cpu, cpu_share=0.5
    )
    prefill.set_rates(rates)
    for layer in range(LAYERS):
        x, ids, weights, want = _chunk(store, layer, 20 + layer)
        rows = 2 * x
        made: list[int] = []

        def half(some: slice, of: torch.Tensor = rows, seen: list[int] = made) -> torch.Tensor:
            seen.append(len(of[some]))
            return of[some] / 2

        prefill.add_to(layer, half, ids, weights, rows)
        assert _error(rows, want + 2 * x.double().numpy()) < 2e-4
        in_pieces = placement == "cpu" or rates is SLOW_LINK
        assert made == ([6, 6, 6, 2] if in_pieces else [TOKENS])


def test_the_cpus_share_follows_rates_between_prompts(store: HostStore) -> None:
    paths = _paths(store, "hybrid", 5)
    prefill = StreamPrefill(
        HostDevice(), store, paths.shape, paths, paths.chunk(ACT), cpu_share=0.6
    )
    prefill.set_rates(PathRates(45.0, 75.0, 4096))
    assert prefill.cpu_share == 0.6
    prefill.set_rates(PathRates(45.0, 25.0, 4096))  # 3:2 becomes 1:2
    assert prefill.cpu_share == pytest.approx(1 / 3)
    prefill.set_rates(PathRates(45.0, 75.0, 4096))
    prefill.set_rates(None)
    assert prefill.cpu_share == pytest.approx(0.6)
    prefill.set_rates(PathRates(45.0, 75.0, 4096))
    prefill.set_rates(PathRates(45.0, 0.0, 4096))
    assert prefill.cpu_share == 0
    prefill.set_rates(PathRates(45.0, 75.0, 4096))
    assert prefill.cpu_share == 75 / 120


@needs_native
def test_pieces_keep_what_the_whole_chunk_uses(store: HostStore) -> None:
    paths = _paths(store, "hybrid", 8)  # experts 0 and 1 of both layers
    bases = [store.base(layer) for layer in range(LAYERS)]
    cpu = DirectShare(cpu_experts(), store.layouts, bases, EXPERTS, ACT)
    cpu.max_tokens = 4
    prefill = StreamPrefill(HostDevice(), store, paths.shape, paths, paths.chunk(ACT), cpu=cpu)
    prefill.set_rates(SLOW_LINK)
    x, _, weights, _ = _chunk(store, 0, 1)
    # The last piece uses only experts 2 and 3, and by its own uses would keep these two.
    ids = torch.tensor([[0, 4]] * 8 + [[0, 5]] * 8 + [[2, 3]] * 4, dtype=torch.int32)
    prefill(0, x, ids, weights)
    # Expert 4's 8 uses drive out expert 1, which has none; 5's 8 and 2's and 3's 4 are not twice as many.
    found = {key // 2 for key, slot in enumerate(paths.residency()[0]) if slot >= 0}
    assert found == {0, 4}


def test_what_nobody_can_serve_is_refused() -> None:
    layout = slab_layout("mxfp4", 64, 64, has_bias=True, num_slices=2)
    store = random_store(layout, LAYERS, EXPERTS, seed=9, threads=1)  # not pinned
    paths = _paths(store, "cpu", 0)
    prefill = StreamPrefill(HostDevice(), store, paths.shape, paths, paths.chunk(ACT))
    x, ids, weights, _ = _chunk(store, 0, 1)
    with pytest.raises(ConfigError, match="not pinned"):
        prefill(0, x, ids, weights)


@needs_triton
@needs_native
@pytest.mark.parametrize("most", [32, 8])
def test_on_the_gpu_with_the_service(store: HostStore, most: int) -> None:
    device = HostDevice() if DEVICE.type == "cpu" else CudaDevice()
    shape = ExecutorShape("hybrid", 1, TOP_K, 6)
    layout = store.layout
    fields = request_block(
        max_tokens=32, top_k=TOP_K, num_experts=EXPERTS, num_slices=2, hidden=layout.hidden
    )
    block = torch.zeros(fields.nbytes + 64, dtype=torch.uint8)
    block = block.pin_memory() if DEVICE.type == "cuda" else block
    block = block[-block.data_ptr() % 64 :][: fields.nbytes]
    paths = GpuPaths(device, store, shape.plan_shape(store), ACT, fields, block, TOP_K)
    bases = [store.base(layer) for layer in range(LAYERS)]
    service = cpu_experts().expert_service(
        store.layouts, bases, EXPERTS, ACT, block, fields, ServiceOptions(1, idle_s=0.0)
    )
    service.start()
    try:
        cpu = ServiceShare(block, fields, 2, lambda: int(service.fault()), paths.answer())
        prefill = StreamPrefill(
            device, store, paths.shape, paths, paths.chunk(ACT), cpu=cpu, cpu_share=0.4
        )
        cpu.max_tokens = most  # 20 tokens at once, or 8, 8 and 4
        prefill.set_rates(SLOW_LINK)
        for seed in (1, 2):
            x, ids, weights, want = _chunk(store, 0, seed)
            found = prefill(0, x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
            assert _error(found, want) < 1e-2  # activations in bfloat16
        assert min(prefill.fetched, prefill.on_cpu) > 0
    finally:
        service.stop()
