"""Experts of 2048 x 768 (Qwen3-30B-A3B) in every slab format on a GPU: exactness, and GB/s of codes.

python -m benchmarks.residency.blocks --check q4_k,q6_k      unpacking and products against references
python -m benchmarks.residency.blocks --out blocks.json      8 of 128 experts a layer, rotating
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.residency import geometry as geo
from benchmarks.residency.kernels import read_only, timed
from headrace.experts.executor import ExecutorShape
from headrace.experts.gpu_paths import GpuPaths, geometry_of
from headrace.experts.model_layout import ExpertKind, model_layouts
from headrace.experts.random_store import random_store
from headrace.experts.request_block import request_block
from headrace.experts.slab_pack import read_slab
from headrace.experts.store import HostStore
from headrace.formats.base import dequantize
from headrace.machine.device import CudaDevice
from headrace.ops import registry
from headrace.ops.records import Activation
from headrace.ops.triton.expert_chunk import BLOCKS, GroupedChunk, GroupedTuning
from headrace.ops.triton.expert_plan import COUNT_HITS
from headrace.ops.triton.experts import BlockTuning, Tuning

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
ACT = Activation()
FORMATS = (
    *("q4_k", "q6_k", "q8_0", "q4_0", "q5_k", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs", "q2_k"),
    *("q3_k", "fp8_e4m3", "nvfp4", "f16", "f32", "mxfp4", "bf16"),
)


class Bench:
    """One layer of random experts, all in slots."""

    def __init__(self, gate_up: str, down: str, tuning: BlockTuning | None, experts: int) -> None:
        self.layout = model_layouts(
            [ExpertKind(gate_up, down)], HIDDEN, INTERMEDIATE, has_bias=False
        )[0]
        self.experts, slices = experts, self.layout.num_slices
        # Few different experts, copied to all slots: what matters is where bytes lie.
        self.store: HostStore = random_store(self.layout, 1, 2, seed=1, threads=4)
        fields = request_block(
            max_tokens=1, top_k=TOP_K, num_experts=experts, num_slices=slices, hidden=HIDDEN
        )
        store = _Many(self.store, experts)
        shape = ExecutorShape("gpu", 1, TOP_K, experts * slices).plan_shape(store)
        self.paths = GpuPaths(
            CudaDevice(), store, shape, ACT, fields, None, TOP_K, Tuning(blocks=tuning)
        )
        self.paths.fill(range(experts * slices))
        self.x = torch.randn(1, HIDDEN, device="cuda")
        self.paths.prepare(0, self.x)
        state = self.paths.state
        state.pair_token.zero_()
        state.pair_weight.fill_(1.0)
        state.counts[COUNT_HITS.value] = TOP_K * slices
        self.lists = []
        for n in range(experts // TOP_K):
            chosen = [(n * TOP_K + place) * 7 % experts for place in range(TOP_K)]
            entries = [
                [e * slices + s, e * slices + s, place, 1]
                for place, e in enumerate(chosen)
                for s in range(slices)
            ]
            self.lists.append(torch.tensor(entries, dtype=torch.int32, device="cuda"))

    def run(self, only: str | None = None) -> None:
        for entries in self.lists:
            self.paths.launcher.compute(self.x, entries, COUNT_HITS.value, only, layer=0)

    def nbytes(self, only: str) -> int:
        names = [p for p in self.layout.parts if p.name.startswith(only)]
        per = sum(p.nbytes for p in names)
        return per * self.layout.num_slices * TOP_K * len(self.lists)


def prompts(gate_up: str, down: str, tokens: int, replays: int = 5) -> dict[str, Any]:
    """ms of a chunk's products, all experts resident: grouped, and TFLOP/s of what was routed."""
    bench = Bench(gate_up, down, None, EXPERTS)
    paths, keys = bench.paths, EXPERTS * bench.layout.num_slices
    x = torch.randn(tokens, HIDDEN, device="cuda")
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    work = np.stack([np.arange(keys), np.arange(keys), np.full(keys, -1)], 1).astype(np.int32)
    found: dict[str, Any] = {"gate_up": gate_up, "down": down, "tokens": tokens}
    layers = [geometry_of(registry.gpu_experts(), bench.layout)]
    for name, blocks in CHUNK_TILES.items():
        chunk = GroupedChunk(layers, paths.state, paths.arena, ACT, blocks=blocks)
        times = []
        for _ in range(replays + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            chunk.begin(0, x, ids, weights)
            chunk.stage(work, [keys])
            chunk.compute(0)
            out = chunk.finish()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        assert bool(torch.isfinite(out).all())
        seconds = min(times[1:])
        flops = tokens * TOP_K * 2 * 3 * HIDDEN * INTERMEDIATE
        found[name] = {"ms": round(seconds * 1e3, 2), "tflops": round(flops / seconds / 1e12, 1)}
    return found


CHUNK_TILES = {
    "default": BLOCKS,
    "64x64": GroupedTuning(*[((64, 64, 64, 4, 2), (64, 64, 64, 4, 2))] * 3),
    "64x64x32": GroupedTuning(*[((64, 64, 32, 4, 3), (64, 64, 32, 4, 3))] * 3),
    "64x128x64": GroupedTuning(*[((64, 128, 64, 4, 2), (64, 128, 64, 4, 2))] * 3),
    "128x128": GroupedTuning(*[((128, 128, 64, 8, 2), (128, 128, 64, 8, 2))] * 3),
}


class _Many:
    """A store that repeats its experts."""

    def __init__(self, store: HostStore, experts: int) -> None:
        self._store, self.num_experts = store, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def slab(self, layer: int, expert: int) -> torch.Tensor:
        return self._store.slab(layer, expert % self._store.num_experts)


def check(fmt: str) -> dict[str, Any]:
    """Errors of products against float64, of a decoding step and of a prompt."""
    start = time.perf_counter()
    bench = Bench(fmt, fmt, None, 8)
    whole = read_slab(bench.store.slab(0, 0), bench.layout)
    gate, up, down = (
        dequantize(m[0]).to("cuda").double() for m in (whole.gate, whole.up, whole.down)
    )
    x = bench.x[0].double()
    g, u = gate @ x, up @ x
    want = down @ (g * torch.sigmoid(g) * u)
    bench.paths.launcher.partial.fill_(float("nan"))
    bench.paths.prepare(0, bench.x)
    bench.run()
    entries, slices = bench.lists[0].cpu().numpy(), bench.layout.num_slices
    place = int(entries[np.flatnonzero(entries[:, 0] % (2 * slices) == 0)[0], 2])
    found = bench.paths.launcher.partial[place].double().sum(0)
    error = float((found - want).abs().max() / want.abs().max())
    chunk = bench.paths.chunk(ACT)
    ids = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    chunk.begin(0, bench.x, ids, torch.ones(1, 1, device="cuda"))
    chunk.stage(np.array([(n, n, -1) for n in range(slices)], np.int32), [slices])
    chunk.compute(0)
    many = chunk.finish()[0].double()
    tiles = float((many - want).abs().max() / want.abs().max())
    return {
        "format": fmt, "error": error, "bf16_error": tiles, "seconds": time.perf_counter() - start
    }  # fmt: skip


def speed(fmt: str, tuning: BlockTuning | None, down: str | None = None) -> dict[str, Any]:
    bench = Bench(fmt, down or fmt, tuning, EXPERTS)
    found: dict[str, Any] = {"format": fmt, "down": down or fmt}
    for only in ("gate_up", "down"):
        seconds = timed(lambda only=only: bench.run(only))
        found[only] = round(bench.nbytes(only) / seconds / 1e9)
    seconds = timed(bench.run)
    found["both"] = round(sum(map(bench.nbytes, ("gate_up", "down"))) / seconds / 1e9)
    found["us_a_layer"] = round(seconds / len(bench.lists) * 1e6, 1)
    return found


def hbm_gbps() -> float:
    data = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    out = torch.empty(132 * 16, dtype=torch.int32, device="cuda")
    seconds = timed(lambda: read_only[(132 * 16,)](data, out, 1 << 28, 4096, num_warps=8))
    return (4 << 28) / seconds / 1e9


def main() -> None:
    parser = geo.parser(__doc__)
    parser.add_argument("--check", help="formats, with commas: check them and stop")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument(
        "--tuning",
        action="append",
        help="programs,warps,rows,columns,terms and those of gate/up",
        default=[],
    )
    parser.add_argument("--prompts", help="tokens, with commas: time chunks and stop")
    args = parser.parse_args()
    if args.prompts:
        for pair in args.formats.split(","):
            fmt, _, down = pair.partition("/")
            for tokens in map(int, args.prompts.split(",")):
                print(prompts(fmt, down or fmt, tokens), flush=True)
        return
    if args.check:
        for fmt in args.check.split(","):
            try:
                print(check(fmt), flush=True)
            except Exception as error:  # the other formats are still worth knowing
                print(fmt, type(error).__name__, str(error)[:1500], flush=True)
        return
    figures: dict[str, Any] = {"hbm_read": hbm_gbps(), "formats": []}
    print(figures, flush=True)
    given = [t.split(",") for t in args.tuning]
    tunings = [BlockTuning(*map(int, t[:4]), t[4] == "1", *map(int, t[5:])) for t in given]
    for tuning in tunings or [None]:
        for pair in args.formats.split(","):
            fmt, _, down = pair.partition("/")
            try:
                row = speed(fmt, tuning, down or None) | {"tuning": str(tuning)}
            except Exception as error:
                row = {"format": pair, "error": str(error)[:500]}
            print(row, flush=True)
            figures["formats"].append(row)
    geo.report("expert blocks", figures, args.out)


if __name__ == "__main__":
    main()
