"""The CUDA C++ of sealed decoding, lane by lane on a CPU, beside the float64 reference.

``tests/fixtures/cuda_on_cpu.h`` plays the GPU: warps, shuffles, matrix products as the PTX manual defines
them. What it cannot show is timing and the order of asynchronous copies.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.ops import reference
from headrace.ops.triton import sealed_decode_cuda
from tests.fixtures.sealed_cases import sealed_case
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import needs_triton

COMPILER = shutil.which("g++")
pytestmark = [needs_triton, pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")]
HEADER = Path(__file__).parents[2] / "fixtures" / "cuda_on_cpu.h"
DECODE = {op.name: op.function for op in reference.OPS}["sealed_attention_decode"]
ENTRIES = """
static Call the_call;
extern "C" void run_decode(const Call* call, int x, int y, int z) {
    the_call = *call;
    gridDim = {x, y, z};
    kernel = [] { sealed_decode(the_call); };
    for (int i = 0; i < x * y * z; i++) {
        blockIdx = {i % x, i / x % y, i / x / y};
        run_block(32 * WARPS + 32);
    }
}
struct Merge {
    const float2* sums; const float *mixed, *sinks; float* out; const int* lens;
    int window; Cut cut; int slots, sinks_too;
};
static Merge the_merge;
extern "C" void run_merge(const Merge* merge, int x, int y) {
    the_merge = *merge;
    gridDim = {x, y, 1};
    kernel = [] {
        Merge& m = the_merge;
        sealed_merge(m.sums, m.mixed, m.sinks, m.out, m.lens, m.window, m.cut, m.slots, m.sinks_too);
    };
    for (int i = 0; i < x * y; i++) {
        blockIdx = {i % x, i / x, 0};
        run_block(GROUPS * DIM);
    }
}
"""


class _Merge(ctypes.Structure):
    _fields_ = (
        *((f"pointer{i}", ctypes.c_void_p) for i in range(5)),
        ("window", ctypes.c_int), ("cut", sealed_decode_cuda.Cut), ("slots", ctypes.c_int),
        ("sinks_too", ctypes.c_int),
    )  # fmt: skip


class _Kernel:
    """Stands for ``cuda_source.Kernel``."""

    def __init__(self, function: Any, structure: Any, dims: int) -> None:
        self.function, self.structure, self.dims = function, structure, dims

    def launch(
        self, grid: tuple[int, int, int], threads: int, *args: Any, overlaps: bool = False
    ) -> None:
        packed = (
            args[0]
            if self.structure is None
            else self.structure(*(getattr(a, "value", a) for a in args))
        )
        self.function(ctypes.byref(packed), *grid[: self.dims])


@pytest.fixture
def kernels(tmp_path: Path):
    """The kernels compiled for a CPU."""

    def build(group: int, rank: int, shape: sealed_decode_cuda.Shape) -> dict[str, _Kernel]:
        program = tmp_path / "program.cpp"
        program.write_text(f'#include "{HEADER}"\n{sealed_decode_cuda.source()}\n{ENTRIES}')
        library = tmp_path / "program.so"
        defines = sealed_decode_cuda.defines(group, rank, shape)
        command = [COMPILER, "-O1", "-std=c++20", "-w", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run(
            [*command, *(f"-D{d}" for d in defines), str(program)], check=True, timeout=120
        )
        made = ctypes.CDLL(str(library))
        return {
            "sealed_decode": _Kernel(made.run_decode, None, 3),
            "sealed_merge": _Kernel(made.run_merge, _Merge, 2),
        }

    return build


SHAPE = sealed_decode_cuda.USUAL
CASES = [
    # contexts, (heads, key heads), rank, window, shape
    ([30, 64, 65, 9 * 64 + 1], (8, 2), 4, None, SHAPE),
    ([200, 700, 17], (3, 3), 0, 100, SHAPE),
    # Parts longer than most, and of an odd number of pages.
    ([45 * 64 + 5], (8, 1), 4, 2700, replace(SHAPE, few_parts=1, max_parts=2, warps=1)),
    ([25 * 64], (4, 1), 4, None, replace(SHAPE, warps=3, stages=2, max_parts=128)),
]


@pytest.mark.parametrize(("contexts", "heads", "rank", "window", "shape"), CASES)
def test_source_computes_the_reference(
    contexts, heads, rank, window, shape, kernels, monkeypatch: pytest.MonkeyPatch
):
    """Row by row, with a sink where there are residuals."""
    num_heads, kv_heads = heads
    case = sealed_case("nvfp4k-fp8v", contexts, kv_heads=kv_heads, dim=128, page=64, rank=rank)
    case.fill(contexts)
    rng = np.random.default_rng(rank)
    q = torch.from_numpy(rng.normal(size=(len(contexts), num_heads, 128))).float()
    sinks = torch.from_numpy(rng.normal(size=num_heads)).float() if rank else None
    batch = case.batch([(s, n - 1, n) for s, n in enumerate(contexts)])
    wide = None if sinks is None else sinks.double()
    expected = DECODE(q.double(), case.cache, batch, 128**-0.5, window, wide)
    made = kernels(num_heads // kv_heads, rank, shape)
    monkeypatch.setattr(sealed_decode_cuda, "_kernels", lambda *key: made)
    monkeypatch.setattr(sealed_decode_cuda, "_num_multiprocessors", lambda device: 2)
    found = sealed_decode_cuda.decode(q, case.cache, batch, 128**-0.5, window, sinks, shape)
    error = (found.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(error.max()) < 2e-3  # probabilities have 11 bits
