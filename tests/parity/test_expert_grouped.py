"""Grouped products of a prompt chunk against float64, and what they leave in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.experts.executor import ExecutorShape
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.random_store import random_store
from headrace.experts.request_block import request_block
from headrace.experts.slab import slab_layout
from headrace.experts.slab_pack import read_slab
from headrace.experts.store import HostStore
from headrace.experts.stream import StreamPrefill
from headrace.machine.device import CudaDevice, HostDevice
from headrace.ops.records import Activation
from tests.fixtures.cpu_oracle import values_of
from tests.fixtures.slabs import expert_float64
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton

LAYERS, EXPERTS, SLICES = 2, 5, 2
ACT = Activation("swiglu_clamped")


@pytest.fixture(scope="module", params=["mxfp4", "bf16", "q8_0", "q4_1 q5_0"])
def store(request: pytest.FixtureRequest) -> Iterator[HostStore]:
    formats = request.param.split()
    layout = slab_layout(
        formats[0], 96, 64, has_bias=True, num_slices=SLICES, down_format=formats[-1]
    )
    made = random_store(layout, LAYERS, EXPERTS, seed=3, threads=1, pin=DEVICE.type == "cuda")
    yield made
    made.close()


def _device() -> HostDevice | CudaDevice:
    return HostDevice() if DEVICE.type == "cpu" else CudaDevice()


def _paths(store: HostStore, slots: int, top_k: int = 2) -> GpuPaths:
    shape = ExecutorShape("stream", 1, top_k, slots).plan_shape(store)
    fields = request_block(
        max_tokens=1, top_k=top_k, num_experts=EXPERTS, num_slices=SLICES, hidden=96
    )
    return GpuPaths(_device(), store, shape, ACT, fields, None, top_k, max_tokens=1)


def _want(store: HostStore, layer: int, x: torch.Tensor, ids: list[list[int]], weights):
    want = np.zeros(x.shape)
    for t, row in enumerate(ids):
        for j, expert in enumerate(row):
            if expert >= 0:
                y = _float64(store, layer, expert, x[t].double().numpy())
                want[t] += float(weights[t, j]) * y
    return want


def _float64(store: HostStore, layer: int, expert: int, x: np.ndarray) -> np.ndarray:
    layout, slab = store.layouts[layer], store.slab(layer, expert)
    if layout.format in ("mxfp4", "bf16"):
        return expert_float64(layout, slab, x, ACT)
    e = read_slab(slab, layout)
    bias = [b[0].double().numpy() for b in (e.gate_bias, e.up_bias, e.down_bias)]
    g, u = values_of(e.gate[0]) @ x + bias[0], values_of(e.up[0]) @ x + bias[1]
    g, u = np.minimum(g, ACT.limit), np.clip(u, -ACT.limit, ACT.limit)
    return values_of(e.down[0]) @ (g / (1 + np.exp(-ACT.alpha * g)) * (u + 1)) + bias[2]


def _random(tokens: int, seed: int, top_k: int = 2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 96, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k).indices.int()
    return x, ids, torch.rand(tokens, top_k, generator=generator)


def _error(found: torch.Tensor, want: np.ndarray) -> float:
    return float(np.abs(found.cpu().numpy() - want).max() / np.abs(want).max())


def _run(chunk, layer: int, x, ids, weights, work: list[list[tuple[int, int, int]]]):
    chunk.begin(layer, x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    ends = np.cumsum([len(one) for one in work]).tolist()
    chunk.stage(np.array([e for one in work for e in one], np.int32).reshape(-1, 3), ends)
    for number in range(len(work)):
        chunk.compute(number)
    return chunk.finish()


def test_work_lists_in_any_order_add_up(store: HostStore) -> None:
    everything = LAYERS * EXPERTS * SLICES
    paths = _paths(store, everything)
    paths.fill(list(range(everything)))
    first = EXPERTS * SLICES  # of layer 1
    entries = [(first + key, key, -1) for key in range(first)]
    x, ids, weights = _random(21, 5)
    ids[4] = -1
    ids[7] = torch.tensor([3, 3])  # counts with both weights
    want = _want(store, 1, x, ids.tolist(), weights)
    # Experts 4 and half of 3; nothing; 1 and 0; 2 and the other half.
    work = [entries[7:], [], entries[2:4] + entries[:2][::-1], entries[4:7]]
    found = _run(paths.chunk(ACT), 1, x, ids, weights, work)
    assert _error(found, want) < 1e-2  # activations in bfloat16
    again = _run(paths.chunk(ACT), 1, x, ids, weights, work)
    assert torch.equal(found, again)


def test_a_long_chunk_is_added_to_what_it_is_made_from(store: HostStore) -> None:
    everything = LAYERS * EXPERTS * SLICES
    paths = _paths(store, everything)
    paths.fill(list(range(everything)))
    entries = [(EXPERTS * SLICES + key, key, -1) for key in range(EXPERTS * SLICES)]
    x, ids, weights = _random(21, 5)
    ids[4] = -1
    ids[7] = torch.tensor([3, 3])  # counts with both weights
    want = 2 * x.double().numpy() + _want(store, 1, x, ids.tolist(), weights)
    # Experts 4 and half of 3; nothing; 1 and 0; 2 and the other half.
    work = [entries[7:], [], entries[2:4] + entries[:2][::-1], entries[4:7]]

    def run() -> torch.Tensor:
        chunk, out = paths.chunk(ACT), 2 * x.to(DEVICE)
        given = ids.to(DEVICE), weights.to(DEVICE)
        chunk.begin_into(1, lambda rows: 0.5 * out[rows], *given, out)
        ends = np.cumsum([len(one) for one in work]).tolist()
        chunk.stage(np.array([e for one in work for e in one], np.int32), ends)
        for number in range(len(work)):
            chunk.compute(number)
        assert chunk.finish() is out
        return out

    found = run(), run()
    assert _error(found[0], want) < 1e-2  # activations in bfloat16
    assert torch.equal(*found)


def test_both_ways_of_adding_agree_where_experts_have_many_tokens(store: HostStore) -> None:
    """Expert by expert to the tokens' rows, and to a row of each pair; tiles of 128 tokens on a GPU."""
    everything = LAYERS * EXPERTS * SLICES
    paths = _paths(store, everything)
    paths.fill(list(range(everything)))
    x, ids, weights = (t.to(DEVICE) for t in _random(5000 if DEVICE.type == "cuda" else 100, 6))
    work = np.array([(key, key, -1) for key in range(EXPERTS * SLICES)], np.int32)
    chunk, sums = paths.chunk(ACT), []
    for out in (None, torch.zeros_like(x)):
        if out is None:
            chunk.begin(0, x, ids, weights)
        else:
            chunk.begin_into(0, lambda rows: x[rows], ids, weights, out)
        chunk.stage(work, [3, len(work)])
        chunk.compute(0)
        chunk.compute(1)
        sums.append(chunk.finish())
    assert (sums[0] - sums[1]).abs().max() < 1e-2 * sums[0].abs().max()


def test_a_slice_that_is_not_listed_is_not_added(store: HostStore) -> None:
    paths = _paths(store, 4)
    paths.fill([0, 1, 2, 3])
    x, ids, weights = _random(3, 8)
    ids[:] = 1
    ids[:, 1] = -1
    one, other = (
        _run(paths.chunk(ACT), 0, x, ids, weights, [[(slot, slot, -1)]]).cpu() for slot in (2, 3)
    )
    want = _want(store, 0, x, ids.tolist(), weights)
    assert _error(one + other, want) < 1e-2
    assert _error(one, want) > 1e-2


def test_the_most_used_streamed_slices_take_slots_of_the_least_used(store: HostStore) -> None:
    paths = _paths(store, 4)
    paths.fill([0, 1, 2, 3])  # experts 0 and 1 of layer 0
    transit = paths.shape.num_slots
    paths.slots(transit, 2).copy_(store.slab(0, 3))
    x, _, weights = _random(9, 1)
    ids = torch.tensor([[0, 3]] * 3 + [[3, 0]] * 3 + [[1, 3]] * 3, dtype=torch.int32)
    hits = [(slot, slot, -1) for slot in range(4)]
    work = [hits, [(transit, 6, -2), (transit + 1, 7, -2)]]
    found = _run(paths.chunk(ACT), 0, x, ids, weights, work)
    assert _error(found, _want(store, 0, x, ids.tolist(), weights)) < 1e-2
    # 9 uses of expert 3 are more than twice 3 uses of expert 1, whose slices leave in order.
    assert paths.residency()[0].tolist()[:8] == [0, 1, -1, -1, -1, -1, 2, 3]
    assert torch.equal(paths.slots(2, 2).cpu(), store.slab(0, 3))
    assert paths.view().owner_of.tolist() == [0, 1, 6, 7]
    # Told to, slices of expert 0 make room, too.
    work = [[(transit, 8, 1), (transit + 1, 9, 0)]]
    paths.slots(transit, 2).copy_(store.slab(0, 4))
    _run(paths.chunk(ACT), 0, x, ids, weights, work)
    assert paths.residency()[0].tolist() == [-1, -1, -1, -1, -1, -1, 2, 3, 1, 0]
    assert torch.equal(paths.slots(0, 2).cpu(), store.slab(0, 4)[[1, 0]])


@pytest.mark.parametrize("added", [False, True])
def test_a_long_chunk_streams_all_layers_without_knowing_the_routing(
    store: HostStore, added: bool
) -> None:
    paths = _paths(store, 9)
    paths.fill([0, 1, 2, 3, 10, 11, 12, 13, 14])
    prefill = StreamPrefill(_device(), store, paths.shape, paths, paths.chunk(ACT))
    for layer in range(LAYERS):
        x, ids, weights = _random(64, layer)
        given = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
        want = _want(store, layer, x, ids.tolist(), weights)
        if added:
            found = given[0].clone()
            prefill.add_to(layer, lambda rows, of=found: of[rows], *given[1:], found)
            want += x.double().numpy()
        else:
            found = prefill(layer, *given)
        assert _error(found, want) < 1e-2
    # 64 tokens borrow one slot, whose slice was worth no more than the others.
    assert prefill.hit == 8
    assert prefill.fetched == LAYERS * EXPERTS * SLICES - 8
    assert (paths.residency() >= 0).sum() == 8
    for slot, key in enumerate(paths.view().owner_of.tolist()):
        if key >= 0:
            row, piece = divmod(key, SLICES)
            assert torch.equal(paths.slot(slot).cpu(), store.slab(*divmod(row, EXPERTS))[piece])
            assert paths.residency().ravel()[key] == slot
