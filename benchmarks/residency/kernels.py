"""The expert kernels one by one on a GPU: correctness at real sizes, GB/s, launch costs (bar 02.4).

python -m benchmarks.residency.kernels --out kernels.json
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.residency import geometry as geo
from headrace.experts.cache_policy import value_constants
from headrace.experts.request_block import request_block
from headrace.experts.slab import SlabLayout
from headrace.ops.records import Activation
from headrace.ops.triton import expert_launch, expert_state

ACT = Activation("swiglu_clamped")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@triton.jit
def read_only(data, out, NUM, CHUNK: tl.constexpr):
    acc = tl.zeros([CHUNK], tl.int32)
    for start in range(tl.program_id(0) * CHUNK, NUM, tl.num_programs(0) * CHUNK):
        at = start + tl.arange(0, CHUNK).to(tl.int64)
        acc += tl.load(data + at, mask=at < NUM, other=0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def timed(body: Callable[[], None], replays: int = 6) -> float:
    """Seconds of one replay of ``body`` captured in a graph: the median."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return sorted(found)[len(found) // 2]


class Bench:
    def __init__(self, num_slots: int, lists: int, tokens: int = 1, has_cpu: bool = False) -> None:
        self.layout = geo.layout()
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        slices = self.layout.num_slices
        where = request_block(
            max_tokens=tokens, top_k=geo.TOP_K, num_experts=geo.EXPERTS, num_slices=slices,
            hidden=geo.HIDDEN,
        )  # fmt: skip
        offsets = tuple(
            a // 4 for a in (where.header, where.items, where.pair_token, where.pair_weight)
        )
        block = torch.zeros(where.nbytes // 4, dtype=torch.int32).pin_memory() if has_cpu else None
        self.geometry = expert_state.PlanGeometry(
            18, geo.EXPERTS, slices, num_slots, 12 * tokens, 32 * slices, tokens, geo.TOP_K, offsets
        )
        device = torch.device("cuda")
        self.state = expert_state.new_plan_state(
            self.geometry, value_constants(18, slices).table(), device, block
        )
        nbytes = self.layout.slice_nbytes
        self.arena = torch.empty(
            (num_slots + 12 * tokens) * nbytes, dtype=torch.uint8, device=device
        )
        geo.fill_random(self.arena.view(-1, nbytes), self.layout, 1)
        self.bases = torch.zeros(18, dtype=torch.int64, device=device)
        self.request = expert_launch.RequestOffsets(
            *(
                at // 4
                for at in (
                    where.ack,
                    where.abort,
                    where.ready,
                    where.x,
                    where.out,
                )
            )
        )
        self.launcher = self.make(expert_launch.Tuning())
        self.x = torch.randn(tokens, geo.HIDDEN, device=device)
        # Lists of experts that rotate through the arena.
        experts = num_slots // slices
        self.lists = []
        for n in range(lists):
            entries = []
            for place in range(geo.TOP_K):
                expert = (n * geo.TOP_K + place) * 7 % experts
                entries += [
                    [expert * slices + s, expert * slices + s, place, 1] for s in range(slices)
                ]
            self.lists.append(torch.tensor(entries, dtype=torch.int32, device=device))
        self.state.counts[0] = geo.TOP_K * slices
        self.state.pair_weight.fill_(0.25)
        self.state.pair_of.copy_(torch.arange(len(self.state.pair_of)))
        self.state.on_gpu.fill_((1 << slices) - 1)

    def make(self, tuning: expert_launch.Tuning) -> expert_launch.ExpertLauncher:
        at = {part.name: part.offset for part in self.layout.parts}
        slices = expert_launch.SliceGeometry(
            "mxfp4", geo.HIDDEN, self.layout.width, self.layout.num_slices,
            self.layout.slice_nbytes, True,
            *(tuple(at[n + s] for s in ("", "_scales", "_bias")) for n in ("gate_up", "down")),
        )  # fmt: skip
        return expert_launch.ExpertLauncher(
            slices, self.state, self.arena, self.bases, ACT, self.request, self.sms, tuning
        )


def matrix(layout: SlabLayout, piece: torch.Tensor, name: str) -> torch.Tensor:
    part, scales = layout.part(name), layout.part(name + "_scales")
    raw = piece[part.offset : part.offset + part.nbytes].view(part.rows, -1).long()
    table = torch.tensor(E2M1, dtype=torch.float64, device=piece.device)
    values = torch.stack([table[raw & 15], table[raw >> 4]], -1).reshape(part.rows, -1)
    e = piece[scales.offset : scales.offset + scales.nbytes].view(scales.rows, -1).double()
    return values * torch.exp2(e - 127).repeat_interleave(32, 1)


def expert_float64(layout: SlabLayout, slab: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sum of the slices of ``slab``, uint8 [n, slice_nbytes], for x float64 [hidden]."""
    out = torch.zeros(geo.HIDDEN, dtype=torch.float64, device=slab.device)
    for piece in slab:

        def bias(name: str, piece: torch.Tensor = piece) -> torch.Tensor:
            part = layout.part(name)
            return piece[part.offset : part.offset + part.nbytes].view(torch.float32).double()

        y = matrix(layout, piece, "gate_up") @ x + bias("gate_up_bias")
        gate, up = y[0::2].clamp(max=7.0), y[1::2].clamp(-7.0, 7.0)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        out += matrix(layout, piece, "down") @ h + bias("down_bias")
    return out


def reference(bench: Bench, entries: torch.Tensor) -> torch.Tensor:
    pieces = bench.arena.view(-1, bench.layout.slice_nbytes)
    slots = entries[:, 0].long()
    return 0.25 * expert_float64(bench.layout, pieces[slots], bench.x[0].double())


def check(bench: Bench) -> dict[str, Any]:
    launcher = bench.launcher
    bench.state.hits[: len(bench.lists[0])] = bench.lists[0]
    launcher.partial.fill_(float("nan"))
    launcher.prepare(bench.x)
    launcher.hits(bench.x)
    out = launcher.combine(1)[0].double()
    want = reference(bench, bench.lists[0])
    again = launcher.combine(1)[0].double()
    error = float((out - want).abs().max() / want.abs().max())
    return {
        "error": error,
        "l2": float((out - want).norm() / want.norm()),
        "same_bits": bool((out == again).all()),
    }


def hbm(bench: Bench) -> float:
    words = bench.arena.view(torch.int32)
    out = torch.empty(bench.sms * 16, dtype=torch.int32, device="cuda")
    best = 0.0
    for chunk, per in ((2048, 8), (4096, 4), (4096, 8)):
        seconds = timed(
            lambda c=chunk, p=per: read_only[(bench.sms * p,)](
                words, out, words.numel(), c, num_warps=8
            )
        )
        best = max(best, bench.arena.numel() / seconds / 1e9)
    return best


def part_nbytes(layout: SlabLayout, name: str) -> int:
    return sum(p.nbytes for p in layout.parts if p.name.startswith(name))


# What differs from the tuning in use.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": False},
    {"gate_up_tiles": 6, "down_warps": 4},
    {"whole": True},
]


def matvec(bench: Bench, rate: float) -> list[dict[str, Any]]:
    """Each half alone and both in turn: from memory, and on six slices that stay in L2, where what is
    left is not the memory's fault."""
    rows = []
    for change in VARIANTS:
        launcher = bench.make(replace(expert_launch.Tuning(), **change))
        launcher.prepare(bench.x)
        for which in (None,) if change.get("whole") else ("gate_up", "down", None):
            rows.append({"kernel": which or "both", **change, **one(bench, launcher, which, rate)})
            print(rows[-1], flush=True)
    return rows


def one(bench: Bench, launcher: Any, which: str | None, rate: float) -> dict[str, float]:
    near = bench.lists[0][torch.arange(len(bench.lists[0])) % 6]

    def far() -> None:
        for entries in bench.lists:
            launcher.compute(bench.x, entries, 0, only=which)

    def again() -> None:
        for _ in bench.lists:
            launcher.compute(bench.x, near, 0, only=which)

    seconds, near_s = (timed(body) / len(bench.lists) for body in (far, again))
    parts = ("gate_up", "down") if which is None else (which,)
    nbytes = sum(part_nbytes(bench.layout, part) for part in parts)
    gbps = geo.TOP_K * bench.layout.num_slices * nbytes / seconds / 1e9
    return {
        "us": seconds * 1e6,
        "gbps": gbps,
        "percent_of_read": 100 * gbps / rate,
        "in_l2_us": near_s * 1e6,
    }


def gather(bench: Bench) -> list[dict[str, Any]]:
    nbytes = bench.layout.slice_nbytes
    count = 280
    host = torch.empty(count * nbytes, dtype=torch.uint8, pin_memory=True)
    host.view(torch.int64).copy_(bench.arena.view(torch.int64)[: host.numel() // 8])
    bench.bases.fill_(host.data_ptr())
    rows = []
    slots = bench.geometry.num_slots
    lists = []
    for n in range(30):
        entries = [[slots + f, (n * 12 + f) * 11 % count, 0, 1] for f in range(12)]
        lists.append(torch.tensor(entries, dtype=torch.int32, device="cuda"))
    bench.state.counts[1] = 12
    target = bench.arena[slots * nbytes : slots * nbytes + (1 << 28)]
    for grid, words, warps in (
        (16, 2048, 8),
        (24, 2048, 8),
        (32, 2048, 8),
        (48, 2048, 8),
        (24, 1024, 4),
        (24, 4096, 8),
        (64, 1024, 4),
        (12, 4096, 8),
    ):
        launcher = bench.make(
            replace(
                expert_launch.Tuning(), gather_programs=grid, gather_words=words, gather_warps=warps
            )
        )

        def body(launcher: Any = launcher) -> None:
            for entries in lists:
                launcher.gather(0, entries)

        seconds = timed(body, 3) / len(lists)
        rows.append(
            {"programs": grid, "words": words, "warps": warps, "gbps": 12 * nbytes / seconds / 1e9}
        )
        print(rows[-1], flush=True)
    pieces = bench.arena.view(-1, nbytes)
    source = host.view(-1, nbytes)
    rows.append(
        {
            "equal": all(
                bool((pieces[s].cpu() == source[i]).all()) for s, i, _, _ in lists[-1].tolist()
            )
        }
    )
    size = min(target.numel(), host.numel())
    seconds = timed(lambda: target[:size].copy_(host[:size], non_blocking=True), 3)
    rows.append({"copy_engine_gbps": size / seconds / 1e9})
    print(rows[-2:], flush=True)
    bench.state.counts[1] = 0
    return rows


def launches() -> dict[str, float]:
    found: dict[str, float] = {}
    for tokens in (1, 4, 16):
        found |= launches_of(tokens)
        torch.cuda.empty_cache()
    return found


def launches_of(tokens: int) -> dict[str, float]:
    """Microseconds of each kernel without work, and of the plan, by batch size."""
    bench = Bench(1000, 1, tokens, has_cpu=True)
    device = torch.device("cuda")
    ids = torch.rand(tokens, geo.EXPERTS, device=device).topk(geo.TOP_K).indices.int()
    weights = torch.rand(tokens, geo.TOP_K, device=device)
    state, launcher, x = bench.state, bench.launcher, bench.x
    state.counts.zero_()
    found: dict[str, float] = {}

    def time_(name: str, one: Callable[[], Any]) -> None:
        def body() -> None:
            for _ in range(20):
                one()

        found[f"{name}_us_T{tokens}"] = timed(body) / 20 * 1e6

    time_("prepare", lambda: launcher.prepare(x))
    time_("await_none", launcher.await_cpu)
    time_("combine", lambda: launcher.combine(tokens))
    time_("hits_none", lambda: launcher.hits(x))
    time_("gather_none", lambda: launcher.gather(0))
    for most in (0, 3):
        state.split.copy_(torch.arange(state.split.shape[1]).clamp(max=most))
        time_(f"plan_q{most}", lambda: expert_state.plan_layer(state, 3, ids, weights))
    time_("start_step_1000", lambda: expert_state.start_step(state))
    print(found, flush=True)
    return found


def main() -> None:
    parser = geo.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="names of the parts to run")
    options = parser.parse_args()
    begin = time.perf_counter()
    bench = Bench(num_slots=400, lists=20)  # 80 experts: 1.06 GB, each once
    figures: dict[str, Any] = {}
    rate = 4000.0
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("check", lambda: check(bench)),
        ("read_only_gbps", lambda: hbm(bench)),
        ("matvec", lambda: matvec(bench, figures.get("read_only_gbps", rate))),
        ("check_tuned", lambda: check(bench)),
        ("gather", lambda: gather(bench)),
        ("launches", launches),
    ]
    for name, step in steps:
        if options.only and name not in options.only:
            continue
        try:
            figures[name] = step()
        except Exception:
            figures[name] = traceback.format_exc()[-1500:]
        print(
            name,
            figures[name] if name != "matvec" else "",
            f"{time.perf_counter() - begin:.1f} s",
            flush=True,
        )
    geo.report("residency/kernels", figures, options.out)


if __name__ == "__main__":
    main()
