"""The grouped expert kernels against float64, over hits, fetches and the CPU's part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.experts import plan_oracle as oracle
from headrace.experts.cache_policy import value_constants
from headrace.experts.request_block import request_block
from headrace.experts.slab import SlabLayout, slab_layout
from headrace.ops.records import Activation
from tests.fixtures.slabs import expert_float64, random_slabs
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton

CLAMPED = Activation("swiglu_clamped", 1.702, 7.0)
SILU = Activation("silu")
# Two float16 terms hold 22 bits of an activation; bfloat16 weights meet float32 activations.
TOLERANCE = {"mxfp4": 2e-6, "bf16": 2e-6}


def _setup(layout: SlabLayout, slabs: torch.Tensor, shape: oracle.PlanShape, tokens: int, k: int,
           act: Activation, with_cpu: bool):  # fmt: skip
    from headrace.ops.triton import expert_launch as launch
    from headrace.ops.triton import expert_state

    where = request_block(
        max_tokens=tokens, top_k=k, num_experts=shape.num_experts,
        num_slices=shape.num_slices, hidden=layout.hidden,
    )  # fmt: skip
    request = tuple(
        at // 4 for at in (where.header, where.items, where.pair_token, where.pair_weight)
    )
    geometry = expert_state.PlanGeometry(
        shape.num_layers, shape.num_experts, shape.num_slices, shape.num_slots, shape.max_fetch,
        shape.window, tokens, k, request,
    )  # fmt: skip
    block = torch.zeros(where.nbytes // 4, dtype=torch.int32) if with_cpu else None
    if block is not None and DEVICE.type == "cuda":
        block = block.pin_memory()
    state = expert_state.new_plan_state(
        geometry, value_constants(shape.num_layers, shape.num_slices).table(), DEVICE, block
    )

    def offsets(name: str) -> tuple[int, int, int]:
        at = {part.name: part.offset for part in layout.parts}
        return tuple(at.get(n, 0) for n in (name, f"{name}_scales", f"{name}_bias"))

    slices = launch.SliceGeometry(
        layout.format, layout.hidden, layout.width, layout.num_slices, layout.slice_nbytes,
        layout.has_bias, offsets("gate_up"), offsets("down"),
    )  # fmt: skip
    arena = torch.zeros((shape.num_slots + shape.max_fetch) * layout.slice_nbytes, dtype=torch.uint8,
                        device=DEVICE)  # fmt: skip
    if DEVICE.type == "cuda":
        slabs = slabs.pin_memory()
    bases = torch.tensor([layer.data_ptr() for layer in slabs], dtype=torch.int64, device=DEVICE)
    launcher = launch.ExpertLauncher(
        slices, state, arena, bases, act,
        launch.RequestOffsets(
            *(getattr(where, name) // 4 for name in launch.RequestOffsets.__annotations__)
        ),
        multiprocessors=1,
        tuning=launch.Tuning(
            gather_programs=2, gather_words=512, bf16_gate_up_programs=1, bf16_down_programs=1,
        ),
    )  # fmt: skip
    return state, launcher, where, slabs


@pytest.mark.parametrize(
    ("fmt", "hidden", "inner", "slices", "bias", "act", "tokens"),
    [
        ("mxfp4", 160, 64, 2, True, CLAMPED, 2),
        ("mxfp4", 96, 96, 3, True, CLAMPED, 1),
        ("mxfp4", 64, 64, 1, False, SILU, 2),
        # Slices of an odd number of blocks, and of 18, as gpt-oss' experts have in five slices.
        ("mxfp4", 96, 160, 5, True, CLAMPED, 1),
        ("mxfp4", 96, 160, 5, False, SILU, 1),
        ("mxfp4", 32, 576, 1, True, CLAMPED, 1),
        ("mxfp4", 32, 576, 1, False, SILU, 2),
        ("bf16", 48, 40, 5, True, CLAMPED, 2),
        ("bf16", 64, 64, 4, False, SILU, 1),
    ],
)
def test_hits_fetches_and_cpu_add_up(
    fmt: str, hidden: int, inner: int, slices: int, bias: bool, act: Activation, tokens: int
) -> None:
    from headrace.ops.triton import expert_state

    experts, k = 5, 3
    layout = slab_layout(fmt, hidden, inner, has_bias=bias, num_slices=slices)
    slabs = random_slabs(layout, 1, experts, seed=3)
    shape = oracle.PlanShape(1, experts, slices, num_slots=4, max_fetch=3 * slices, window=16)
    state, launcher, where, slabs = _setup(layout, slabs, shape, tokens, k, act, with_cpu=True)
    generator = torch.Generator().manual_seed(7)
    for _step in range(3):
        x = torch.randn(tokens, hidden, generator=generator)
        ids = torch.rand(tokens, experts, generator=generator).topk(k).indices.to(torch.int32)
        ids[0, 2] = -1
        weights = torch.rand(tokens, k, generator=generator)
        # Two thirds of the misses are fetched.
        state.split.copy_((torch.arange(state.split.shape[1]) * 2 // 3).to(torch.int32))
        x_, ids_, weights_ = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
        launcher.prepare(x_)
        expert_state.start_step(state)
        expert_state.plan_layer(state, 0, ids_, weights_)
        launcher.gather(0)
        launcher.hits(x_)
        launcher.fetched(x_)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        _answer(state.block, where, layout, slabs[0], act)
        launcher.await_cpu()
        out = launcher.combine(tokens).cpu()
        assert int(state.state[3]) == 0
        want = np.zeros((tokens, hidden))
        for t in range(tokens):
            for j in range(k):
                if ids[t, j] >= 0:
                    y = expert_float64(layout, slabs[0, ids[t, j]], x[t].double().numpy(), act)
                    want[t] += float(weights[t, j]) * y
        error = np.abs(out.numpy() - want).max() / np.abs(want).max()
        assert error < TOLERANCE[fmt]
    totals = state.totals.tolist()
    assert min(totals[0], totals[1], totals[2]) > 0, "all three paths were taken"


def _answer(block: torch.Tensor, where, layout: SlabLayout, slabs: torch.Tensor, act) -> None:
    """What the CPU's service does, in float64."""

    def ints(at: int, n: int) -> list[int]:
        return block[at // 4 : at // 4 + n].tolist()

    if int(block[where.seq // 4]) == int(block[where.ack // 4]):
        return
    floats = block.view(torch.float32)
    _, tokens, items, _ = ints(where.header, 4)
    x = floats[where.x // 4 :][: tokens * layout.hidden].view(tokens, -1).double().numpy()
    out = np.zeros((tokens, layout.hidden))
    for i in range(items):
        expert, piece, first, count = ints(where.items + 16 * i, 4)
        for p in range(first, first + count):
            token = ints(where.pair_token + 4 * p, 1)[0]
            weight = float(floats[where.pair_weight // 4 + p])
            y = expert_float64(layout, slabs[expert], x[token], act, pieces=[piece])
            out[token] += weight * y
    at = where.out // 4
    floats[at : at + tokens * layout.hidden] = torch.from_numpy(out).float().flatten()
    block[where.ack // 4] = block[where.seq // 4]


def test_a_silent_cpu_is_noticed_and_later_waits_end_at_once() -> None:
    from headrace.ops.triton import expert_state

    layout = slab_layout("bf16", 32, 32, has_bias=False, num_slices=1)
    slabs = random_slabs(layout, 1, 2, seed=1)
    shape = oracle.PlanShape(1, 2, 1, num_slots=1, max_fetch=0, window=4)
    state, launcher, where, _ = _setup(layout, slabs, shape, 1, 1, SILU, with_cpu=True)
    launcher.tuning = replace(launcher.tuning, await_spins=50)
    x = torch.ones(1, 32, device=DEVICE)
    for _ in range(2):
        launcher.prepare(x)
        expert_state.plan_layer(
            state, 0, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
            torch.ones(1, 1, device=DEVICE),
        )  # fmt: skip
        launcher.await_cpu()
    assert int(state.state[3]) == 1
    assert int(state.block[where.abort // 4]) == 1
