"""Prefetched slices give the same results, whole or interrupted, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.foresight import guess, surest
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.host_paths import HostPaths
from headrace.experts.random_store import random_store
from headrace.experts.request_block import request_block
from headrace.experts.slab import slab_layout
from headrace.experts.store import HostStore
from headrace.formats.base import PackedTensor
from headrace.machine.device import CudaDevice, HostDevice
from headrace.ops.expert_records import RouterView
from headrace.ops.records import Activation
from headrace.ops.registry import gpu_experts
from tests.fixtures.slabs import expert_float64
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN = 2, 6, 2, 2, 128
ACT = Activation("swiglu_clamped")
TOLERANCE = 2e-4  # two int8 terms in two products in a row


@pytest.fixture(scope="module")
def store() -> Iterator[HostStore]:
    """Slices of 3 chunks, so that a copy can end between them."""
    made = random_store(
        slab_layout("mxfp4", HIDDEN, 192, has_bias=True, num_slices=1), LAYERS, EXPERTS,
        seed=5, threads=1, pin=DEVICE.type == "cuda",
    )  # fmt: skip
    assert 2 < made.layout.slice_nbytes / 16384 <= 3
    yield made
    made.close()


class Router:
    """Routes by x itself; its guess of another x is right as far as that x is alike."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        data = torch.randn(EXPERTS, HIDDEN, generator=generator)
        self.scale = torch.rand(HIDDEN, generator=generator) + 0.5
        self.bias = torch.randn(EXPERTS, generator=generator)
        self.data = data.bfloat16()

    def view(self, device: torch.device) -> RouterView:
        weight = PackedTensor("bf16", (EXPERTS, HIDDEN), {"data": self.data.to(device)})
        return RouterView(weight, self.bias.to(device), self.scale.to(device), 1e-5, TOP_K)

    def choose(self, x: torch.Tensor) -> torch.Tensor:
        """By float64 and by hand: logits of rmsnorm(x) * scale."""
        x = x.double()
        normed = x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * self.scale
        return (normed @ self.data.double().T + self.bias).topk(TOP_K).indices.int()


def _run(executor: HybridExecutor, store: HostStore, noise: float, steps: int) -> float:
    """The largest error of some steps; attention, and the layer before if guesses are early, add ``noise``
    to what is guessed from."""
    device, router = executor.device.torch_device, Router()
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    for _ in range(steps):
        executor.step_begins(TOKENS)
        states = [torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(LAYERS + 1)]
        for layer in range(LAYERS):
            before = states[layer]
            x = before + noise * torch.randn(TOKENS, HIDDEN, generator=generator)
            ids = router.choose(x)
            weights = torch.rand(TOKENS, TOP_K, generator=generator)
            executor.foresee(layer, before.to(device), router.view(device), None)
            executor.attended(layer, states[layer + 1].to(device), None)
            found = executor(layer, x.to(device), ids.to(device), weights.to(device)).cpu()
            want = np.zeros(x.shape)
            for t, row in enumerate(ids.tolist()):
                for j, expert in enumerate(row):
                    slab = store.slab(layer, expert)
                    y = expert_float64(store.layout, slab, x[t].double().numpy(), ACT)
                    want[t] += float(weights[t, j]) * y
            worst = max(worst, float(np.abs(found.numpy() - want).max() / np.abs(want).max()))
        executor.step_ended()
    return worst


def _shape(slots: int) -> ExecutorShape:
    return ExecutorShape("stream", TOKENS, TOP_K, slots, max_prefetch=2)


def _host_executor(store: HostStore, slots: int) -> HybridExecutor:
    shape = _shape(slots)
    paths = HostPaths(store, shape.plan_shape(store), ACT)
    made = HybridExecutor(HostDevice(), store, shape, paths)
    made.set_rates(None)
    made.fill()
    return made


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("noise", "slots"), [(0.0, 3), (0.5, 3), (5.0, 1), (0.0, 0)])
def test_guesses_never_change_results(
    store: HostStore, noise: float, slots: int, early: bool
) -> None:
    executor = _host_executor(store, slots)
    executor.early, executor.foreseen_tokens = early, TOKENS
    assert _run(executor, store, noise, 6) < 1e-6
    counts, nbytes = executor.counts(), store.layout.slice_nbytes
    assert counts.prefetched_nbytes >= counts.ahead_nbytes > 0
    if noise == 0:
        # Two guesses a layer are right; what each token's first choice misses is there.
        assert counts.ahead_nbytes == counts.prefetched_nbytes
        assert counts.ahead_nbytes <= counts.fetched * nbytes
    if noise == 5:
        assert counts.ahead_nbytes < counts.prefetched_nbytes


def test_what_stays_is_a_hit_of_the_next_step(store: HostStore) -> None:
    """One layer's one expert: prefetched to its own slot, then moved into the cache's only one."""
    shape = ExecutorShape("stream", 1, 1, 1, max_prefetch=1)
    paths = HostPaths(store, shape.plan_shape(store), ACT)
    executor = HybridExecutor(HostDevice(), store, shape, paths)
    executor.set_rates(None)
    router = Router()
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3))
    ids, one = router.choose(x)[:, :1].contiguous(), torch.ones(1, 1)
    view = router.view(torch.device("cpu"))
    outs = []
    for _ in range(2):
        executor.foresee(0, x, view, None)
        outs.append(executor(0, x, ids, one))
        torch.testing.assert_close(paths.arena[0], store.slab(0, int(ids))[0])
    assert torch.equal(*outs)
    counts = executor.counts()
    assert (counts.hits, counts.fetched) == (1, 1)
    # The second time the guess's first expert is there already, and its second travels in vain.
    assert counts.ahead_nbytes == store.layout.slice_nbytes
    assert counts.prefetched_nbytes == 2 * counts.ahead_nbytes


def _interrupt(paths: GpuPaths, layer: int, there: int) -> None:
    """As if the prefetch had ended after ``there`` chunks: what had not arrived is spoilt."""
    s, nbytes, chunk = paths.state, paths._store.layout.slice_nbytes, 16384
    first = paths.shape.prefetch_slot(layer, 0)
    sent = int(s.arrived.sum())
    assert sent == 3 * int(s.state[7])  # three chunks a slice
    for g in range(min(there, sent), sent):
        start = (first + g // 3) * nbytes + g % 3 * chunk
        end = min(start + chunk, (first + g // 3 + 1) * nbytes)
        paths.arena[start:end] = 0xFF
        s.arrived[g % s.arrived.numel()] -= 1


@needs_triton
def test_an_interrupted_prefetch_is_finished_by_the_gather(store: HostStore) -> None:
    """Bytes, not results: every fetch lies where the plan says, and so does what stays of it."""
    device = HostDevice() if DEVICE.type == "cpu" else CudaDevice()
    fields = request_block(
        max_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS, num_slices=1, hidden=HIDDEN
    )
    shape, router, generator = _shape(3), Router(), torch.Generator().manual_seed(4)
    tuning = gpu_experts().Tuning(gather_programs=2, settle_programs=2)
    paths = GpuPaths(
        device, store, shape.plan_shape(store), ACT, fields, None, TOP_K, tuning, max_tokens=TOKENS
    )
    paths.set_split([list(range(shape.max_missing(store) + 1))] * LAYERS)
    used = 0
    for there in (0, 1, 2, 3, 4, 5, 6):
        paths.begin_step()
        for layer in range(LAYERS):
            before = torch.randn(TOKENS, HIDDEN, generator=generator)
            ids = router.choose(before + 0.5 * torch.randn(TOKENS, HIDDEN, generator=generator))
            paths.prefetch(layer, paths.guess(before.to(DEVICE), router.view(DEVICE)), TOP_K, None)
            _interrupt(paths, layer, there)
            paths.plan(layer, ids.to(DEVICE), torch.ones(TOKENS, TOP_K, device=DEVICE))
            paths.gather(layer)
            fetches = paths.state.fetches[: int(paths.state.counts[1])].tolist()
            for f, (slot, expert, *_) in enumerate(fetches):
                assert torch.equal(paths.slots(slot, 1)[0].cpu(), store.slab(layer, expert)[0]), (
                    there
                )
                used += int(paths.state.origins[f]) >= 0
            for expert, slot in enumerate(paths.residency()[layer].tolist()):
                if slot >= 0:
                    assert torch.equal(
                        paths.slots(slot, 1)[0].cpu(), store.slab(layer, expert)[0]
                    ), there
    assert used > LAYERS
    counts = paths.counts()
    assert 0 < counts.ahead_nbytes < counts.prefetched_nbytes


@needs_triton
def test_the_kernel_guesses_what_the_router_would_choose() -> None:
    from headrace.ops.triton import expert_state
    from headrace.ops.triton.expert_prefetch import PrefetchLauncher

    router = Router()
    geometry = expert_state.PlanGeometry(
        1, EXPERTS, 1, 1, 1, 4, 3, TOP_K, (0, 0, 0, 0), max_prefetch=1, slice_nbytes=16
    )
    state = expert_state.new_plan_state(geometry, [1.0] * 8, DEVICE, None)
    bytes_ = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    bases = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    launcher = PrefetchLauncher(state, bytes_, bases, [16])
    x = 3 * torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = router.choose(x).tolist()
    logits = launcher.guess(x.to(DEVICE), router.view(DEVICE))
    assert logits.topk(TOP_K).indices.tolist() == expected
    assert surest(guess(x, router.view(torch.device("cpu"))), TOP_K).tolist() == expected
