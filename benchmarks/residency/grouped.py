"""The grouped expert kernels of prompt chunks: errors and speed by tile, one layer of experts in slots.

    python -m benchmarks.residency.grouped [--sweep]

gpt-oss-120b's geometry. TFLOP/s count the tokens that were routed, not the tiles' padding; GB/s count
each expert's bytes once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from benchmarks.residency.kernels import matrix
from headrace.experts.executor import ExecutorShape
from headrace.experts.gpu_paths import GpuPaths, geometry_of
from headrace.experts.random_store import random_store
from headrace.experts.request_block import request_block
from headrace.experts.store import HostStore
from headrace.experts.stream import StreamPrefill
from headrace.machine.device import CudaDevice
from headrace.ops import registry
from headrace.ops.expert_keep import NOWHERE
from headrace.ops.records import Activation
from headrace.ops.triton.expert_chunk import GroupedChunk, GroupedTuning

ACT = Activation("swiglu_clamped")
TILES = {
    (0, "few", 64): [(64, 16, 64, 4, 3)],
    (1, "few", 64): [(64, 16, 64, 4, 3), (64, 16, 32, 4, 4), (64, 16, 32, 4, 3)],
    (0, "some", 2048): [(64, 64, 32, 4, 4), (64, 64, 32, 4, 3), (64, 32, 64, 4, 3)],
    (1, "some", 2048): [(64, 64, 32, 4, 4), (64, 64, 32, 4, 3), (64, 32, 64, 4, 3), (128, 64, 32, 8, 3)],
    (0, "many", 8192): [(64, 128, 32, 4, 3), (64, 128, 32, 4, 4), (64, 256, 32, 8, 3)],
    (1, "many", 8192): [(64, 128, 32, 4, 3), (64, 128, 32, 4, 4), (128, 128, 32, 8, 3)],
}  # fmt: skip


def make(store: HostStore, slots: int) -> GpuPaths:
    shape = ExecutorShape("stream", 4, geo.TOP_K, slots).plan_shape(store)
    fields = request_block(
        max_tokens=4, top_k=geo.TOP_K, num_experts=geo.EXPERTS,
        num_slices=store.layout.num_slices, hidden=geo.HIDDEN,
    )  # fmt: skip
    return GpuPaths(CudaDevice(), store, shape, ACT, fields, None, geo.TOP_K, max_tokens=4)


def routed(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, geo.HIDDEN, device="cuda", generator=generator)
    scores = torch.rand(tokens, geo.EXPERTS, device="cuda", generator=generator)
    weights = torch.rand(tokens, geo.TOP_K, device="cuda", generator=generator)
    return x, scores.topk(geo.TOP_K).indices.int(), weights


def float64(store: HostStore, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    layout = store.layout

    def bias(piece: torch.Tensor, name: str) -> torch.Tensor:
        part = layout.part(name)
        return piece[part.offset : part.offset + part.nbytes].view(torch.float32).double()

    for expert in range(geo.EXPERTS):
        token, place = (ids == expert).nonzero().T
        if not len(token):
            continue
        for piece in store.slab(0, expert).cuda():
            y = x[token].double() @ matrix(layout, piece, "gate_up").T + bias(piece, "gate_up_bias")
            gate, up = y[:, 0::2].clamp(max=7.0), y[:, 1::2].clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            y = h @ matrix(layout, piece, "down").T + bias(piece, "down_bias")
            out.index_add_(0, token, y * weights[token, place].double().unsqueeze(1))
    return out


def run(chunk: Any, inputs: Any, work: Any) -> torch.Tensor:
    chunk.begin(0, *inputs)
    chunk.stage(work, [len(work)])
    chunk.compute(0)
    return chunk.finish()


def entries(layout: Any) -> Any:
    keys = torch.arange(geo.EXPERTS * layout.num_slices, dtype=torch.int32)
    return torch.stack([keys, keys, torch.full_like(keys, NOWHERE)], 1).numpy()


def timed(work: Any, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        work()
        b.record()
        b.synchronize()
        best = min(best, a.elapsed_time(b) * 1e-3)
    return best


def speeds(paths: GpuPaths, tuning: GroupedTuning, tokens: int, halves: str) -> dict[str, float]:
    geometry = geometry_of(registry.gpu_experts(), paths.layout)
    chunk = GroupedChunk([geometry], paths.state, paths.arena, ACT, tuning)
    chunk.begin(0, *routed(tokens))
    work = entries(paths.layout)
    chunk.stage(work, [len(work)])
    work = chunk.launches[0]
    flop = 2 * tokens * geo.TOP_K * geo.HIDDEN * geo.INTERMEDIATE
    found: dict[str, float] = {}
    for half, share in (("gate_up", 2), ("down", 1)):
        if half in halves:
            seconds = timed(lambda h=half: getattr(chunk, h)(work))
            found[f"{half}_ms"] = round(seconds * 1e3, 3)
            found[f"{half}_tflops"] = round(flop * share / seconds / 1e12, 1)
            found[f"{half}_gbps"] = round(geo.EXPERTS * 13.2e6 * share / 3 / seconds / 1e9)
    return found


def configurations() -> list[tuple[str, GroupedTuning, int]]:
    """(half, tuning, tokens)."""
    found: list[tuple[str, GroupedTuning, int]] = []
    for (half, field, tokens), tiles in TILES.items():
        for tile in tiles:
            pair = list(getattr(GroupedTuning(), field))
            pair[half] = tile
            changed = replace(GroupedTuning(), **{field: tuple(pair)})
            found.append((("gate_up", "down")[half], changed, tokens))
    return found


def check(store: HostStore, paths: GpuPaths, say: Any) -> None:
    """Errors against float64, of resident slices and through the ring."""
    work = entries(store.layout)
    streaming = make(store, 100)
    streaming.fill(list(range(100)))
    for tokens in (17, 64, 600, 2048, 8192):
        inputs = routed(tokens)
        chunk = paths.chunk(ACT)
        found, want = run(chunk, inputs, work), float64(store, *inputs)
        prefill = StreamPrefill(
            CudaDevice(), store, streaming.shape, streaming, streaming.chunk(ACT)
        )
        streamed = [prefill(0, *inputs), prefill(0, *inputs)]
        largest = want.abs().max()
        say(
            f"tokens_{tokens}",
            {
                "error": float((found - want).abs().max() / largest),
                "l2": float((found - want).norm() / want.norm()),
                "same_bits": all(torch.equal(found, run(chunk, inputs, work)) for _ in range(5)),
                "streamed": [float((s - found).abs().max() / largest) for s in streamed],
                "fetched": prefill.fetched,
                "hit": prefill.hit,
            },
        )


def main() -> None:
    parser = geo.parser(__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", help="only compile every n-th configuration: first/n")
    options = parser.parse_args()
    layout = geo.layout()
    if options.compile:
        first, step = map(int, options.compile.split("/"))
        store = random_store(layout, 1, geo.EXPERTS, seed=2, threads=2, pin=False)
        paths = make(store, 640)
        for half, tuning, tokens in configurations()[first::step]:
            try:
                speeds(paths, tuning, tokens, half)
            except Exception as error:
                print(half, tuning, repr(error)[:200], flush=True)
        return
    figures = geo.Figures()
    say = figures.say
    store = random_store(layout, 1, geo.EXPERTS, seed=1, threads=4, pin=True)
    paths = make(store, geo.EXPERTS * layout.num_slices)
    paths.fill(list(range(geo.EXPERTS * layout.num_slices)))
    if not options.sweep:
        check(store, paths, say)
    for tokens in (10, 64, 512, 2048, 8192):
        say(f"speed_{tokens}", speeds(paths, GroupedTuning(), tokens, "gate_up down"))
    if options.sweep:
        for half, tuning, tokens in configurations():
            tile = tuning.tiles(tokens * geo.TOP_K // geo.EXPERTS)[half == "down"]
            try:
                say(f"{half} {tile} {tokens}", speeds(paths, tuning, tokens, half))
            except Exception as error:
                say(f"{half} {tile}", repr(error)[:200])
    geo.report("residency/grouped", figures.found, options.out)


if __name__ == "__main__":
    main()
