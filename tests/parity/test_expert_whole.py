"""Experts in one kernel on a GPU: float64, graphs, any slots, blocks that something keeps from starting."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.experts.cache_policy import value_constants
from headrace.experts.slab import SlabLayout, slab_layout
from headrace.ops.records import Activation
from tests.fixtures.slabs import expert_float64, random_slabs
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]

CLAMPED, SILU = Activation("swiglu_clamped", 1.702, 7.0), Activation("silu")
TOLERANCE = 2e-6  # two float16 terms hold 22 bits of an activation
TOKENS, TOP_K = 4, 3


@dataclass
class Case:
    """A launcher over slots in which every slice lies, and entries for them."""

    layout: SlabLayout
    slabs: torch.Tensor  # uint8 [experts, slices, slice_nbytes]
    state: object
    launcher: object
    x: torch.Tensor

    def listed(self, order: list[int]) -> None:
        """Give the kernel all slices of three experts, of slots in this order."""
        s = self.layout.num_slices
        pieces = self.slabs.flatten(0, 1)
        arena = self.launcher._arena.view(-1, self.layout.slice_nbytes)
        # Expert 0 for pairs 0 and 1, expert 1 for 2 to 5, expert 2 for 6.
        rows = []
        for expert, first, count in ((0, 0, 2), (1, 2, 4), (2, 6, 1)):
            for piece in range(s):
                key = expert * s + piece
                arena[order[key]] = pieces[key].to(DEVICE)
                rows.append([order[key], key, first, count])
        self.state.hits[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    def run(self, count: int) -> torch.Tensor:
        self.state.counts[0] = count
        self.launcher.partial.fill_(torch.nan)
        self.launcher.prepare(self.x)
        self.launcher.hits(self.x)
        torch.cuda.synchronize()
        return self.launcher.partial.clone()

    def wanted(self, count: int) -> np.ndarray:
        s = self.layout.num_slices
        want = np.full((TOKENS * TOP_K, s, self.layout.hidden), np.nan)
        act, tokens = self.launcher._act, self.state.pair_token.tolist()
        for _, key, first, pairs in self.state.hits[:count].tolist():
            for pair in range(first, first + pairs):
                x = self.x[tokens[pair]].double().cpu().numpy()
                y = expert_float64(self.layout, self.slabs[key // s], x, act, pieces=[key % s])
                want[pair, key % s] = float(self.state.pair_weight[pair]) * y
        return want


def _case(hidden: int, inner: int, slices: int, bias: bool, act: Activation) -> Case:
    from headrace.ops.triton import expert_launch as launch
    from headrace.ops.triton import expert_state, expert_whole_cuda

    layout = slab_layout("mxfp4", hidden, inner, has_bias=bias, num_slices=slices)
    slots = 3 * slices + 2
    geometry = expert_state.PlanGeometry(1, 8, slices, slots, 0, 4, TOKENS, TOP_K, (0, 0, 0, 0))
    constants = value_constants(1, slices).table()
    state = expert_state.new_plan_state(geometry, constants, DEVICE, None)
    at = {part.name: part.offset for part in layout.parts}
    gate_up, down = (
        tuple(at.get(name + s, 0) for s in ("", "_scales", "_bias")) for name in ("gate_up", "down")
    )
    place = launch.SliceGeometry(
        "mxfp4", hidden, layout.width, slices, layout.slice_nbytes, bias, gate_up, down
    )
    if not expert_whole_cuda.takes(place, DEVICE):
        pytest.skip("this GPU has the kernels in Triton only")
    arena = torch.zeros(slots * layout.slice_nbytes, dtype=torch.uint8, device=DEVICE)
    launcher = launch.ExpertLauncher(
        place, state, arena, torch.zeros(1, dtype=torch.int64, device=DEVICE), act,
        launch.RequestOffsets(0, 0, 0, 0, 0), tuning=launch.Tuning(whole=True),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    state.pair_token[:7] = torch.tensor([0, 3, 0, 1, 2, 3, 2], dtype=torch.int32, device=DEVICE)
    state.pair_weight[:] = torch.rand(TOKENS * TOP_K, generator=generator).to(DEVICE)
    x = torch.randn(TOKENS, hidden, generator=generator).to(DEVICE)
    case = Case(layout, random_slabs(layout, 1, 3, seed=9)[0], state, launcher, x)
    case.listed(list(range(3 * slices)))
    return case


@pytest.mark.parametrize(
    ("hidden", "inner", "slices", "bias", "act"),
    [
        (2880, 2880, 5, True, CLAMPED),
        (160, 64, 2, True, CLAMPED),
        (96, 160, 5, False, SILU),
        (2048, 768, 4, False, SILU),
        (32, 576, 1, True, CLAMPED),
    ],
)
def test_any_count_is_float64s_and_the_same_each_time(hidden, inner, slices, bias, act) -> None:
    case = _case(hidden, inner, slices, bias, act)
    for count in sorted({0, 1, slices, 3 * slices}):
        found = case.run(count)
        want = case.wanted(count)
        written = ~np.isnan(want)
        np.testing.assert_array_equal(~np.isnan(found.cpu().numpy()), written)
        if count:
            error = np.abs(found.cpu().numpy() - want)[written].max() / np.abs(want[written]).max()
            assert error < TOLERANCE
        for _ in range(5):
            torch.testing.assert_close(case.run(count), found, rtol=0, atol=0, equal_nan=True)


def test_slots_and_graphs_do_not_change_bits() -> None:
    case = _case(2880, 2880, 5, True, CLAMPED)
    found = case.run(15)
    case.listed([16 - key for key in range(15)])
    torch.testing.assert_close(case.run(15), found, rtol=0, atol=0, equal_nan=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            case.launcher.hits(case.x)
    case.launcher.partial.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(case.launcher.partial, found, rtol=0, atol=0, equal_nan=True)


HOLD = """
extern "C" __global__ void hold(unsigned long long ns) {
    extern __shared__ unsigned char held[];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
    if (!ns) held[0] = 1;
}
"""


def test_blocks_that_cannot_start_are_stood_in_for() -> None:
    from headrace.ops.triton import cuda_source, expert_whole_cuda

    case = _case(2880, 2880, 5, True, CLAMPED)
    found = case.run(15)
    properties = torch.cuda.get_device_properties(DEVICE)
    capability = torch.cuda.get_device_capability(DEVICE)
    nbytes = properties.shared_memory_per_block_optin
    hold = cuda_source.load(cuda_source.compiled(HOLD, capability, ()), {"hold": nbytes})["hold"]
    # All multiprocessors but four are taken for longer than any block waits.
    ns = ctypes.c_ulonglong(8 * expert_whole_cuda.PATIENCE_NS)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        hold.launch((properties.multi_processor_count - 4, 1, 1), 32, ns)
    torch.testing.assert_close(case.run(15), found, rtol=0, atol=0, equal_nan=True)
