"""Expert kernels for any slab format against float64, alone and mixed between matrices and layers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from headrace.core.numeric import FORMATS
from headrace.experts.executor import ExecutorShape
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.request_block import request_block
from headrace.experts.slab_pack import layouts_of
from headrace.experts.store import HostStore, build_store
from headrace.machine.device import CudaDevice, HostDevice
from headrace.ops.records import Activation, ExpertWeights
from tests.fixtures.cpu_oracle import activation, values_of
from tests.fixtures.expert_slabs import CLAMPED, SILU, matrix
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton
EXPERTS, TOP_K, TOKENS = 2, 2, 2
# float32 sums of exact weights and float32 activations, over two matrices.
FLOATS = 1e-5
# Two int8 terms hold 15 bits of a block's largest activation (2e-5 of a row), twice.
TERMS = 1e-4
# Matrices to bfloat16 once, activations twice.
BFLOAT16 = 2e-2
TERM_FORMATS = frozenset({"q4_k", "q5_k", "q6_k", "q8_0", "q4_0"})
ALONE = [name for name in FORMATS if name not in ("bf16", "mxfp4", "mxfp4_gguf")]
# gate/up and down, as llama.cpp's presets mix them, and where rows are no superblocks.
MIXED = [
    [("q4_k", "q6_k"), ("q4_k", "q4_k")],
    [("q4_k", "q8_0"), ("q5_k", "q5_0"), ("q8_0", "q8_0")],
    [("q2_k", "q3_k"), ("mxfp4_gguf", "q8_0"), ("bf16", "f16")],
]


def experts_of(gate_up: str, down: str, hidden: int, inner: int, seed: int) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    return ExpertWeights(
        [matrix(gate_up, inner, hidden, rng) for _ in range(EXPERTS)],
        [matrix(gate_up, inner, hidden, rng) for _ in range(EXPERTS)],
        [matrix(down, hidden, inner, rng) for _ in range(EXPERTS)],
    )


def store_of(layers: list[ExpertWeights], slices: int | None = None) -> HostStore:
    pin = DEVICE.type == "cuda"
    return build_store(layers, layouts_of(layers, slices), threads=1, pin=pin)


def paths_of(store: HostStore, act: Activation, gate_up_rows: int = 32) -> GpuPaths:
    """All slices in slots. gate_up_rows: 64 leave results as down multiplies them."""
    from headrace.ops.triton.experts import BlockTuning, Tuning

    slots = store.num_layers * store.num_experts * store.layout.num_slices
    shape = ExecutorShape("gpu", TOKENS, TOP_K, slots).plan_shape(store)
    fields = request_block(
        max_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS, hidden=store.layout.hidden,
        num_slices=store.layout.num_slices,
    )  # fmt: skip
    device = HostDevice() if DEVICE.type == "cpu" else CudaDevice()
    few = {"programs": 1, "rows": 64, "gate_up_programs": 1} if DEVICE.type == "cpu" else {}
    tuning = Tuning(blocks=BlockTuning(gate_up_rows=gate_up_rows, **few))
    paths = GpuPaths(device, store, shape, act, fields, None, TOP_K, tuning)
    paths.fill(range(slots))
    return paths


def computed(paths: GpuPaths, store: HostStore, layer: int, x: torch.Tensor) -> np.ndarray:
    """Every expert for every token, by the slots' kernels: [experts, T, hidden]."""
    from headrace.ops.triton.expert_plan import COUNT_HITS

    s, slices = paths.state, store.layout.num_slices
    paths.launcher.prepare(x.to(DEVICE))
    out = np.zeros((EXPERTS, *x.shape))
    s.pair_token[: len(x)] = torch.arange(len(x), dtype=torch.int32)
    s.pair_weight[: len(x)] = 0.5
    for expert in range(EXPERTS):
        first = (layer * EXPERTS + expert) * slices
        entries = [[first + p, expert * slices + p, 0, len(x)] for p in range(slices)]
        s.hits[:slices] = torch.tensor(entries, dtype=torch.int32)
        s.counts[COUNT_HITS.value] = slices
        paths.launcher.hits(x.to(DEVICE), layer)
        out[expert] = paths.launcher.partial[: len(x)].double().sum(1).cpu().numpy()
    return 2 * out


def expected(experts: ExpertWeights, x: torch.Tensor, act: Activation) -> np.ndarray:
    rows = x.double().numpy()
    each = zip(experts.gate, experts.up, experts.down)
    values = ([values_of(m).astype(np.float64) for m in expert] for expert in each)
    return np.stack([activation(rows @ g.T, rows @ u.T, act.kind) @ d.T for g, u, d in values])


def inputs(experts: ExpertWeights, hidden: int, seed: int) -> torch.Tensor:
    """Activations that make gates of about 2, so that no activation function saturates."""
    x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(seed))
    gates = x.double().numpy() @ values_of(experts.gate[0]).astype(np.float64).T
    return x * (2.0 / float(gates.std()))


def tolerance(formats: Iterable[str]) -> float:
    return TERMS if TERM_FORMATS.intersection(formats) else FLOATS


def error(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", ALONE)
def test_every_format_gives_the_float64_result(name: str) -> None:
    used = {name}
    act = CLAMPED if name in ("q8_0", "fp8_e4m3") else SILU
    experts = experts_of(name, name, 256, 256, seed=1)
    store = store_of([experts])
    x = inputs(experts, 256, seed=2)
    paths = paths_of(store, act, 64 if name in ("q4_k", "q8_0") else 32)
    assert error(computed(paths, store, 0, x), expected(experts, x, act)) < (
        TERMS if TERM_FORMATS.intersection(used) else FLOATS
    )
    store.close()


@pytest.mark.parametrize("kinds", MIXED, ids=lambda kinds: "+".join("/".join(k) for k in kinds))
def test_layers_of_different_formats_share_slots(kinds: list[tuple[str, str]]) -> None:
    layers = [experts_of(g, d, 256, 512, seed=i) for i, (g, d) in enumerate(kinds)]
    store = store_of(layers)
    paths = paths_of(store, SILU)
    chunk, keys = paths.chunk(SILU), EXPERTS * store.layout.num_slices
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[1.0, 0.5], [2.0, 0.0], [0.25, 1.0]], device=DEVICE)
    for layer, experts in enumerate(layers):
        x, used = inputs(experts, 256, seed=layer), kinds[layer]
        want = expected(experts, x, SILU)
        assert error(computed(paths, store, layer, x), want) < (
            TERMS if TERM_FORMATS.intersection(used) else FLOATS
        )
        # A prompt's chunk: tokens 0, 1 and 0 once more.
        chunk.begin(layer, x[[0, 1, 0]].to(DEVICE), ids, weights)
        chunk.stage(
            np.array([(layer * keys + key, key, -1) for key in range(keys)], np.int32), [keys]
        )
        chunk.compute(0)
        a, b = want
        whole = np.stack([a[0] + 0.5 * b[0], 2 * b[1], a[0] + 0.25 * b[0]])
        assert error(chunk.finish().cpu().numpy(), whole) < BFLOAT16
    store.close()


def test_fetches_take_slices_as_long_as_their_layers_into_slots_of_the_longest() -> None:
    from headrace.ops.triton.expert_plan import COUNT_FETCHES

    kinds = (("q4_k", "q6_k"), ("q4_k", "q4_k"))
    layers = [experts_of(g, d, 256, 512, seed=i) for i, (g, d) in enumerate(kinds)]
    store = store_of(layers)
    paths = paths_of(store, SILU)
    s, slices = paths.state, store.layout.num_slices
    for layer in (1, 0):
        paths.arena.zero_()
        s.counts[COUNT_FETCHES.value] = 1
        fetches = torch.tensor([[3, slices + 1, 0, 0]], dtype=torch.int32, device=DEVICE)
        paths.launcher.gather(layer, fetches)
        want = store.slab(layer, 1)[1].to(DEVICE)
        assert torch.equal(paths.slots(3, 1)[0][: len(want)], want)
        assert not paths.slots(3, 1)[0][len(want) :].any()
        assert not paths.slots(2, 1)[0].any()
        assert not paths.slots(4, 1)[0].any()
    assert store.layouts[0].slice_nbytes > store.layouts[1].slice_nbytes
    store.close()
