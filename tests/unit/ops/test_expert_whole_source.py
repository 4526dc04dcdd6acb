"""The CUDA C++ of whole experts, lane by lane on a CPU, beside float64.

``tests/fixtures/cuda_on_cpu.h`` and ``cuda_barriers_on_cpu.h`` play the GPU, one block after the other. So
blocks wait in vain for those after them, and must compute what they wait for themselves.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.experts.slab import SlabLayout, slab_layout
from headrace.ops.records import Activation
from tests.fixtures.slabs import expert_float64, random_slabs
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import needs_triton

COMPILER = shutil.which("g++")
pytestmark = [needs_triton, pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")]
HEADERS = [
    Path(__file__).parents[2] / "fixtures" / name
    for name in ("cuda_on_cpu.h", "cuda_barriers_on_cpu.h")
]
CLAMPED, SILU = Activation("swiglu_clamped", 1.702, 7.0), Activation("silu")
# Two float16 terms hold 22 bits of an activation.
TOLERANCE = 2e-6
ENTRY = """
static Call the_call;
extern "C" void run(const Call* call, int blocks) {
    the_call = *call;
    gridDim = {blocks, 1, 1};
    kernel = [] { expert_whole(the_call); };
    for (int i = 0; i < blocks; i++) {
        blockIdx = {i, 0, 0};
        run_block(32 * WARPS + 96);
    }
}
"""


def _geometry(layout: SlabLayout):
    from headrace.ops.triton.expert_geometry import SliceGeometry

    at = {part.name: part.offset for part in layout.parts}

    def offsets(name: str) -> tuple[int, ...]:
        return tuple(at.get(name + suffix, 0) for suffix in ("", "_scales", "_bias"))

    return SliceGeometry(
        "mxfp4", layout.hidden, layout.width, layout.num_slices, layout.slice_nbytes,
        layout.has_bias, offsets("gate_up"), offsets("down"),
    )  # fmt: skip


def _build(folder: Path, layout: SlabLayout, act: Activation, shape):
    from headrace.ops.triton import expert_whole_cuda as whole

    program = folder / "program.cpp"
    includes = "\n".join(f'#include "{header}"' for header in HEADERS)
    program.write_text(f"{includes}\n{whole.source()}\n{ENTRY}")
    library = folder / "program.so"
    defines = whole.defines(_geometry(layout), act, shape, patience_ns=20_000)
    command = [COMPILER, "-O1", "-std=c++20", "-w", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, *(f"-D{d}" for d in defines), str(program)], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def _halves(x: torch.Tensor) -> torch.Tensor:
    """float32 [n, K] -> float16 [n, 2, K], of each eight values in the order 0 4 1 5 2 6 3 7."""
    scaled = x / 64
    first = scaled.half()
    second = ((scaled - first.float()) * 2048).half()
    both = torch.stack([first, second], 1)
    return both.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3).contiguous()


CASES = [
    # hidden, intermediate, slices, bias, act, blocks, changes of the shape
    (160, 64, 2, True, CLAMPED, 1, {"warps": 2}),
    (160, 64, 2, True, CLAMPED, 3, {"warps": 2, "stages": 2, "own_percent": 100}),
    (96, 160, 5, False, SILU, 7, {"warps": 3, "stages": 3, "own_percent": 0}),
    # Rows of 18 blocks, as gpt-oss' experts have in five slices.
    (32, 576, 1, True, CLAMPED, 2, {"warps": 1}),
]


@pytest.mark.parametrize(("hidden", "inner", "slices", "bias", "act", "blocks", "changes"), CASES)
def test_source_computes_float64(
    hidden, inner, slices, bias, act, blocks, changes, tmp_path: Path
) -> None:
    from headrace.ops.triton import expert_whole_cuda as whole

    layout = slab_layout("mxfp4", hidden, inner, has_bias=bias, num_slices=slices)
    slabs = random_slabs(layout, 1, 3, seed=5)[0]
    shape = replace(whole.Shape(), **changes)
    library = _build(tmp_path, layout, act, shape)
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1))
    pair_token = torch.tensor([0, 2, 1, 1], dtype=torch.int32)
    pair_weight = torch.tensor([0.25, 0.5, 1.5, 2.0])
    # Pairs 0 and 1 want expert 2, pair 2 expert 0, pair 3 expert 1, of which the last slice is not here.
    wanted = [(2, 0, 2), (0, 2, 1), (1, 3, 1)]
    listed = [
        (expert * slices + s, expert * slices + s, first, count)
        for expert, first, count in wanted
        for s in range(slices - (expert == 1))
    ]
    entries = torch.zeros(len(listed) + 2, 4, dtype=torch.int32)
    entries[: len(listed)] = torch.tensor(listed)
    counts = torch.tensor([9, len(listed)], dtype=torch.int32)
    x_halves = _halves(x)
    h_halves = torch.zeros(4, 2, inner, dtype=torch.float16)
    partial = torch.full((4, slices, hidden), torch.nan)
    done = torch.zeros(len(entries) + 3, dtype=torch.int32)
    tensors = (
        slabs, entries, counts, pair_token, pair_weight, x_halves, h_halves, partial, done[3:],
        done[1:], done,
    )  # fmt: skip
    call = whole._Call(*(t.data_ptr() for t in tensors), 1, len(entries))
    library.run(ctypes.byref(call), blocks)
    assert not done.any(), "the next call finds what this one found"
    want = np.full((4, slices, hidden), np.nan)
    for expert, first, count in wanted:
        for pair in range(first, first + count):
            own = x[pair_token[pair]].double().numpy()
            for s in range(slices - (expert == 1)):
                y = expert_float64(layout, slabs[expert], own, act, pieces=[s])
                want[pair, s] = float(pair_weight[pair]) * y
    written = ~np.isnan(want)
    np.testing.assert_array_equal(~np.isnan(partial.numpy()), written)
    error = np.abs(partial.numpy() - want)[written].max() / np.abs(want[written]).max()
    assert error < TOLERANCE
