"""The executor gives the same results wherever experts lie: all placements, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.errors import ConfigError, MachineError
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.host_paths import HostPaths
from headrace.experts.random_store import random_store
from headrace.experts.request_block import request_block
from headrace.experts.slab import slab_layout
from headrace.experts.slab_pack import layouts_of
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore, build_store
from headrace.machine.device import CudaDevice, HostDevice
from headrace.models.loader import load_model
from headrace.ops.expert_records import ServiceFault, ServiceOptions
from headrace.ops.records import Activation
from headrace.ops.registry import cpu_experts, gpu_experts, resolve
from tests.fixtures.cpu_cases import isas, needs_native
from tests.fixtures.paging import Pages
from tests.fixtures.slabs import expert_float64
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 6, 2, 2
ACT = Activation("swiglu_clamped")
RATES = PathRates(pcie_gbps=40.0, cpu_gbps=60.0, slice_nbytes=4096)
# Two int8 terms in two products in a row; the CPU's and the GPU's activations are the same.
TOLERANCE = 2e-4
# name: placement, slots
PLACES = {
    "all on the GPU": ("gpu", LAYERS * EXPERTS * 3),
    "all on the CPU": ("cpu", 0),
    "streamed": ("stream", 8),
    "mixed": ("hybrid", 12),
    "one slot": ("hybrid", 1),
    "thrashing": ("hybrid", 5),
}


@pytest.fixture(scope="module")
def store() -> Iterator[HostStore]:
    layout = slab_layout("mxfp4", 96, 96, has_bias=True, num_slices=3)
    made = random_store(layout, LAYERS, EXPERTS, seed=5, threads=1, pin=DEVICE.type == "cuda")
    yield made
    made.close()


def _device():
    return HostDevice() if DEVICE.type == "cpu" else CudaDevice()


def _host_executor(store: HostStore, placement: str, slots: int, **changes) -> HybridExecutor:
    shape = ExecutorShape(placement, TOKENS, TOP_K, slots)
    cpu = cpu_experts() if isas() and changes.pop("native", False) else None
    paths = HostPaths(store, shape.plan_shape(store), ACT, cpu)
    made = HybridExecutor(HostDevice(), store, shape, paths)
    made.set_rates(RATES)
    made.fill()
    return made


def _expected(store: HostStore, layer: int, x, ids, weights) -> np.ndarray:
    out = np.zeros(x.shape)
    for t, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            if expert >= 0:
                y = expert_float64(
                    store.layout, store.slab(layer, expert), x[t].double().numpy(), ACT
                )
                out[t] += float(weights[t, j]) * y
    return out


def _steps(
    executor: HybridExecutor, store: HostStore, steps: int, device: torch.device | str = "cpu"
) -> float:
    """The largest error of some steps, relative to the largest value."""
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    for _ in range(steps):
        executor.step_begins(TOKENS)
        for layer in range(LAYERS):
            x = torch.randn(TOKENS, store.layout.hidden, generator=generator)
            ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices.int()
            weights = torch.rand(TOKENS, TOP_K, generator=generator)
            found = executor(layer, x.to(device), ids.to(device), weights.to(device)).cpu().numpy()
            want = _expected(store, layer, x, ids, weights)
            worst = max(worst, float(np.abs(found - want).max() / np.abs(want).max()))
        executor.step_ended()
    return worst


@pytest.mark.parametrize("name", PLACES)
def test_b028_every_placement_gives_the_float64_result(store: HostStore, name: str) -> None:
    executor = _host_executor(store, *PLACES[name])
    assert _steps(executor, store, 6) < 1e-6
    counts = executor.counts()
    assert counts.layers == 6 * LAYERS
    taken = (counts.hits > 0, counts.fetched > 0, counts.computed > 0)
    assert taken == {
        "all on the GPU": (True, False, False),
        "all on the CPU": (False, False, True),
        "streamed": (True, True, False),
    }.get(name, (counts.hits > 0, True, True))


@needs_native
def test_b028_the_cpu_kernel_serves_the_misses_within_its_tolerance(store: HostStore) -> None:
    assert _steps(_host_executor(store, "hybrid", 5, native=True), store, 4) < TOLERANCE


def test_two_slots_swapped_are_noticed(store: HostStore) -> None:
    """The mutation that this file must catch: slices of two experts of a layer. (Two slices of one
    expert in each other's slots change nothing: its output is their sum.)"""
    executor = _host_executor(store, "gpu", LAYERS * EXPERTS * 3)
    arena = executor.paths.arena
    other = 3 * LAYERS
    arena[[0, other]] = arena[[other, 0]]
    assert _steps(executor, store, 6) > 1e-2


def test_all_on_the_gpu_needs_a_slot_for_every_slice(store: HostStore) -> None:
    with pytest.raises(ConfigError, match="35 slots for 36 slices"):
        _host_executor(store, "gpu", 35)


def _gpu_executor(store: HostStore, placement: str, slots: int) -> HybridExecutor:
    device = _device()
    shape = ExecutorShape(placement, TOKENS, TOP_K, slots)
    layout = store.layout
    fields = request_block(
        max_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS, num_slices=layout.num_slices,
        hidden=layout.hidden,
    )  # fmt: skip
    block = None
    if placement in ("cpu", "hybrid"):
        block = torch.zeros(fields.nbytes + 64, dtype=torch.uint8)
        block = block.pin_memory() if DEVICE.type == "cuda" else block
        block = block[-block.data_ptr() % 64 :][: fields.nbytes]
    # The interpreter reads the acknowledgement some 30,000 times a second.
    # Few programs with large tiles: the interpreter's time goes by operations, not by numbers.
    tuning = gpu_experts().Tuning(
        await_spins=10_000 if DEVICE.type == "cpu" else 1_000_000,
        bf16_gate_up_programs=1, bf16_down_programs=1, gather_programs=1,
    )  # fmt: skip
    paths = GpuPaths(device, store, shape.plan_shape(store), ACT, fields, block, TOP_K, tuning)
    bases = [store.base(layer) for layer in range(LAYERS)]

    def service():
        return cpu_experts().expert_service(
            store.layouts,
            bases,
            EXPERTS,
            ACT,
            block,
            fields,
            ServiceOptions(1, idle_s=0.0, stall_s=1.0),
        )

    made = HybridExecutor(
        device, store, shape, paths, block=block, new_service=service if block is not None else None
    )
    made.set_rates(RATES)
    made.fill()
    return made


@needs_triton
@needs_native
@pytest.mark.parametrize("name", ["mixed", "one slot", "streamed"])
def test_b028_kernels_and_service_give_the_float64_result(store: HostStore, name: str) -> None:
    executor = _gpu_executor(store, *PLACES[name])
    try:
        assert _steps(executor, store, 1, DEVICE) < TOLERANCE
        counts = executor.counts()
        assert counts.layers == LAYERS
        if name == "mixed":
            assert min(counts.hits, counts.fetched, counts.computed) > 0
    finally:
        executor.service and executor.service.stop()


@needs_triton
def test_both_tables_are_changed_alike_between_steps(store: HostStore) -> None:
    executors = [_host_executor(store, "stream", 8), _gpu_executor(store, "stream", 8)]
    for executor in executors:
        before = executor.paths.view()
        assert executor.paths.slots_used() == int((before.owner_of >= 0).sum()) == 6
        left, taken = int(before.owner_of[2]), [30, 31]
        executor.paths.replace([(2, left, taken[0]), (6, -1, taken[1])])
        after = executor.paths.view()
        assert after.slot_of[left] == -1
        assert [after.slot_of[key] for key in taken] == [2, 6]
        assert [after.owner_of[slot] for slot in (2, 6)] == taken
        assert executor.paths.slots_used() == 7
    host, gpu = (executor.paths.view() for executor in executors)
    assert np.array_equal(host.slot_of, gpu.slot_of)
    assert np.array_equal(host.owner_of, gpu.owner_of)
    assert host.values.shape == gpu.values.shape == (LAYERS * EXPERTS,)
    counts = executors[1].counts()
    assert (counts.fetch_s, counts.stalls, counts.stall_s) == (0.0, 0, 0.0)


@needs_triton
@needs_native
def test_a_dead_worker_fails_the_step_and_is_replaced(store: HostStore) -> None:
    executor = _gpu_executor(store, "cpu", 0)
    try:
        _steps(executor, store, 1, DEVICE)
        executor.service.inject(ServiceFault.DIE, 0)
        with pytest.raises(MachineError, match="experts on the CPU"):
            _steps(executor, store, 1, DEVICE)
        assert _steps(executor, store, 1, DEVICE) < TOLERANCE
        assert executor.num_restarts == 1
    finally:
        executor.service.stop()


def test_b028_greedy_tokens_of_a_model_do_not_depend_on_the_placement(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gpt_oss(tmp_path).path))
    ops = resolve(("reference",))
    found: dict[str, list[int]] = {}
    logits: dict[str, torch.Tensor] = {}
    for name, place in {"in memory": None, **PLACES}.items():
        stores: list[HostStore] = []

        def factory(spec, experts, place=place, stores=stores):
            made = build_store(experts, layouts_of(experts), threads=1, pin=False)
            stores.append(made)
            slices = made.num_layers * made.num_experts * made.layout.num_slices
            placement, slots = place
            shape = ExecutorShape(
                placement, 16, spec.moe.num_experts_per_token,
                slices if placement == "gpu" else min(slots, slices // 2),
            )  # fmt: skip
            act = Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit)
            executor = HybridExecutor(
                HostDevice(), made, shape, HostPaths(made, shape.plan_shape(made), act)
            )
            executor.set_rates(RATES)
            executor.fill()
            return executor

        decoder = load_model(
            checkpoint, ops, HostDevice(), max_positions=64,
            executor_factory=None if place is None else factory,
        )  # fmt: skip
        pages = Pages(decoder.spec)
        sequence = pages.sequence()
        tokens, rows = [5, 9, 3, 11], []
        fed = tokens
        for _ in range(8):
            batch = pages.batch([(sequence, len(fed))])
            rows.append(decoder.logits(decoder.forward(torch.tensor(fed), batch, pages.kv))[-1])
            fed = [int(rows[-1].argmax())]
            tokens = tokens + fed
        found[name], logits[name] = tokens, torch.stack(rows)
        for made in stores:
            made.close()
    for name in PLACES:
        assert found[name] == found["in memory"], name
        error = (logits[name] - logits["in memory"]).abs().max() / logits["in memory"].abs().max()
        assert error < 1e-4, name


@needs_triton
@needs_native
def test_b028_x_that_is_given_ahead_and_a_residual_are_no_other_sums(store: HostStore) -> None:
    """One token: x is sent beside the router's work, and the residual is added where the parts are."""
    executor = _gpu_executor(store, "hybrid", 12)
    generator = torch.Generator().manual_seed(9)
    try:
        executor.step_begins(1)
        for layer in range(LAYERS):
            x, residual = (torch.randn(1, store.layout.hidden, generator=generator) for _ in "ab")
            ids = torch.rand(1, EXPERTS, generator=generator).topk(TOP_K).indices.int()
            weights = torch.rand(1, TOP_K, generator=generator)
            given, added = x.to(DEVICE), residual.to(DEVICE)
            executor.normed(layer, given)
            found = executor.with_residual(layer, given, ids.to(DEVICE), weights.to(DEVICE), added)
            want = _expected(store, layer, x, ids, weights)
            error = np.abs(found.cpu().numpy() - residual.numpy() - want).max()
            assert error / np.abs(want).max() < TOLERANCE
        executor.step_ended()
        assert min(executor.counts().fetched, executor.counts().computed) > 0
    finally:
        executor.service.stop()
