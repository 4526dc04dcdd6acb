"""How fast the CPU's experts are read: the kernel behind its service against a plain read loop.

    PYTHONPATH=src python -m benchmarks.micro.cpu_experts --gigabytes 12 --threads 4 8 15

Requests name whole experts at random out of a store that no cache holds. The plain read loop runs on the
same threads, in the same requests, over the same bytes, and rounds of both alternate. With a GPU both are
measured again beside copies of pinned memory to it at full speed. Prints one JSON object; rates in 10^9
bytes a second of slices.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headrace.experts.request_block import request_block
from headrace.experts.slab import SlabLayout, slab_layout
from headrace.ops.cpu import expert_service as cpu
from headrace.ops.expert_records import ServiceOptions
from headrace.ops.records import Activation

ROUNDS = 5
# Hidden and intermediate size: gpt-oss-120b's for its own format, else the next multiple of 256 that
# every block type can hold.
GPT_OSS = (2880, 2880)
OTHER = (3072, 3072)


class Store:
    """Slabs of one layout in huge pages where the system gives them: valid bytes, the same in each."""

    def __init__(self, layout: SlabLayout, nbytes: int) -> None:
        self.layout = layout
        self.num_experts = nbytes // layout.slab_nbytes
        self._map = mmap.mmap(-1, self.num_experts * layout.slab_nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes.view(self.num_experts, -1).copy_(one_slab(layout).expand(self.num_experts, -1))


def one_slab(layout: SlabLayout) -> torch.Tensor:
    """Bytes of one expert whose numbers are finite and of the size of weights."""
    generator = torch.Generator().manual_seed(0)
    slab = torch.full((layout.num_slices, layout.slice_nbytes), 0x2D, dtype=torch.uint8)
    for part in layout.parts:
        to = slab[:, part.offset : part.offset + part.nbytes]
        if layout.format == "mxfp4" and part.name in ("gate_up", "down"):
            to.random_(0, 256, generator=generator)
        elif part.name.endswith("_scales"):
            to.fill_(120)
        elif part.name.endswith(("_bias", "_factors")):
            to.view(torch.float32).fill_(0.01)
    return slab.reshape(1, -1)


class Bench:
    """A service on a store, asked for random experts by up to ``max_tokens`` tokens."""

    def __init__(
        self, store: Store, threads: int, cpus: Sequence[int], experts: int, max_tokens: int = 16
    ) -> None:
        layout = store.layout
        self.fields = request_block(
            max_tokens=max_tokens,
            top_k=experts,
            num_experts=store.num_experts,
            num_slices=layout.num_slices,
            hidden=layout.hidden,
        )
        self.block = torch.zeros(self.fields.nbytes + 64, dtype=torch.uint8)
        self.block = self.block[-self.block.data_ptr() % 64 :][: self.fields.nbytes]
        self.store, self.experts = store, experts
        self.order = random.Random(1)
        chosen = tuple(cpus[:threads]) if len(cpus) > threads else None
        self.service = cpu.NativeExpertService(
            [layout],
            [store.bytes.data_ptr()],
            store.num_experts,
            Activation("swiglu_clamped"),
            self.block,
            self.fields,
            ServiceOptions(threads, chosen, apart=False, idle_s=1.0),
        )
        f = self.fields
        self.header = self.block[f.header : f.header + 64].view(torch.int32)
        self.items = self.block[f.items : f.items + 16 * f.max_items].view(torch.int32).view(-1, 4)
        x = self.block[f.x : f.x + 4 * f.max_tokens * f.hidden].view(torch.float32)
        x.normal_(generator=torch.Generator().manual_seed(0))

    def __enter__(self) -> Bench:
        self.service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.stop()

    def fill(self, experts: int, slices: int, tokens: int) -> None:
        """The next random experts, every token using each of them."""
        layout, f = self.store.layout, self.fields
        chosen = sorted(self.order.sample(range(self.store.num_experts), experts))
        rows = [[e, s, 0, tokens] for e in chosen for s in range(slices)]
        self.header[:4] = torch.tensor([0, tokens, len(rows), tokens], dtype=torch.int32)
        self.items[: len(rows)] = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)
        pairs = self.block[f.pair_token : f.pair_token + 4 * tokens].view(torch.int32)
        pairs.copy_(torch.arange(tokens, dtype=torch.int32))
        self.block[f.pair_weight : f.pair_weight + 4 * tokens].view(torch.float32).fill_(0.25)
        assert slices <= layout.num_slices

    def gbps(self, seconds: float, *, read: bool, tokens: int = 1) -> float:
        """Bytes over the time of the requests, for about ``seconds``."""
        self.service.read_only(read)
        nbytes = spent = 0.0
        slices = self.store.layout.num_slices
        while spent < seconds:
            self.fill(self.experts, slices, tokens)
            spent += self.service.request(10.0)
            nbytes += self.experts * self.store.layout.slab_nbytes
        return nbytes / spent / 1e9

    def quiet_gbps(self, seconds: float, *, read: bool, tokens: int = 1) -> float:
        """The same where whoever asks sleeps meanwhile, and so leaves its core alone."""
        self.service.read_only(read)
        seq, ack = (
            self.block[at : at + 4].view(torch.int32) for at in (self.fields.seq, self.fields.ack)
        )
        before, end = self.service.stats(), time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.fill(self.experts, self.store.layout.num_slices, tokens)
            seq += 1
            while int(ack) != int(seq):
                time.sleep(1e-4)
        after = self.service.stats()
        return (after.nbytes - before.nbytes) / (after.busy_s - before.busy_s) / 1e9

    def latency_us(self) -> dict[str, float]:
        """Shortest and median time of requests without items, and of one slice."""
        result: dict[str, float] = {}
        self.service.read_only(False)
        for name, slices in (("empty", 0), ("one_slice", 1)):
            times: list[float] = []
            for _ in range(200):
                self.fill(1, slices, 1)
                times.append(self.service.request(10.0) * 1e6)
            result[f"{name}_min_us"] = round(min(times), 1)
            result[f"{name}_median_us"] = round(statistics.median(times), 1)
        return result


def compare(bench: Bench, seconds: float, tokens: int = 1) -> dict[str, float]:
    """Kernel and read loop in turn: minimum, median and maximum of the rounds, and percent."""
    kernel: list[float] = []
    read: list[float] = []
    for _ in range(ROUNDS):
        read.append(bench.gbps(seconds, read=True))
        kernel.append(bench.gbps(seconds, read=False, tokens=tokens))
    result: dict[str, float] = {}
    for name, rates in (("read", read), ("kernel", kernel)):
        for what, rate in (
            *(("min", min(rates)), ("median", statistics.median(rates)), ("max", max(rates))),
        ):
            result[f"{name}_{what}_gbps"] = round(rate, 2)
    result["percent"] = round(100 * statistics.median(k / r for k, r in zip(kernel, read)), 1)
    return result


class Copies:
    """Copies of pinned memory to the GPU, back to back, on a thread of their own."""

    def __init__(self, nbytes: int = 1 << 30) -> None:
        self._from = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._to = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.nbytes, self.seconds, self._stopping = 0, 0.0, False

    def _run(self) -> None:
        stream = torch.cuda.Stream()
        events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        start, turn = time.perf_counter(), 0
        with torch.cuda.stream(stream):
            while not self._stopping:
                self._to.copy_(self._from, non_blocking=True)
                events[turn % 2].record(stream)
                turn += 1
                if turn > 1:
                    events[turn % 2].synchronize()
                    self.nbytes += self._from.numel()
                    self.seconds = time.perf_counter() - start
        stream.synchronize()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.nbytes, self.seconds, self._stopping = 0, 0.0, False
        thread = threading.Thread(target=self._run)
        thread.start()
        time.sleep(0.1)
        try:
            yield
        finally:
            self._stopping = True
            thread.join()

    @property
    def gbps(self) -> float:
        return round(self.nbytes / max(self.seconds, 1e-9) / 1e9, 2)


def measure(
    store: Store, threads: int, cpus: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    result: dict[str, Any] = {"format": store.layout.format, "threads": threads}
    with Bench(store, threads, cpus, args.experts) as bench:
        bench.service.tune(rows=args.rows, near_nbytes=args.near, far_nbytes=args.far)
        result["alone"] = compare(bench, args.seconds)
        result["quiet"] = {
            name: [round(bench.quiet_gbps(args.seconds, read=name == "read"), 2) for _ in range(3)]
            for name in ("read", "kernel")
        }
        result["latency"] = bench.latency_us()
        for tokens in args.tokens:
            result[f"{tokens}_tokens_gbps"] = round(
                bench.gbps(args.seconds, read=False, tokens=tokens), 2
            )
        if torch.cuda.is_available() and not args.no_copies:
            copies = Copies()
            with copies.running():
                time.sleep(0.5)
            result["copies_alone_gbps"] = copies.gbps
            with copies.running():
                result["beside_copies"] = compare(bench, args.seconds)
            result["copies_beside_gbps"] = copies.gbps
    return result


def variants(
    store: Store, threads: int, cpus: Sequence[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rates of the ways to read, in turn and twice, so that a drift shows."""
    found: dict[tuple[int, int, int], list[float]] = {}
    with Bench(store, threads, cpus, args.experts) as bench:
        for _ in range(2):
            found.setdefault((0, 0, 0), []).append(bench.gbps(args.seconds / 2, read=True))
            for rows in (2, 4, 8):
                for near in (512, 1024, 2048, 4096):
                    for far in (0, 4096, 8192, 16384):
                        if far > near or far == 0:
                            bench.service.tune(rows=rows, near_nbytes=near, far_nbytes=far)
                            rate = bench.gbps(args.seconds / 2, read=False)
                            found.setdefault((rows, near, far), []).append(rate)
    return [
        {"rows": r, "near": n, "far": f, "gbps": [round(g, 2) for g in rates]}
        for (r, n, f), rates in found.items()
    ]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", default=["mxfp4", "bf16", "q8_0", "q4_k"])
    parser.add_argument("--threads", nargs="*", type=int, default=[os.cpu_count() or 1])
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the store")
    parser.add_argument("--experts", type=int, default=3, help="whole experts in a request")
    parser.add_argument("--seconds", type=float, default=0.3, help="time of a round")
    parser.add_argument("--tokens", nargs="*", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--variants", action="store_true", help="try ways to read, mxfp4 only")
    parser.add_argument("--no-copies", action="store_true")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--near", type=int, default=1024)
    parser.add_argument("--far", type=int, default=8192)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {
        "benchmark": "cpu_experts",
        "commit": args.commit or git.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "cpus": len(cpus),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "isa": cpu.isa(),
        "reading": {"rows": args.rows, "near_nbytes": args.near, "far_nbytes": args.far},
        "experts_in_a_request": args.experts,
        "results": [],
    }
    for name in args.formats:
        hidden, inner = GPT_OSS if name == "mxfp4" else OTHER
        start = time.perf_counter()
        store = Store(slab_layout(name, hidden, inner, has_bias=True), int(args.gigabytes * 1e9))
        report.setdefault("fill_s", {})[name] = round(time.perf_counter() - start, 1)
        if args.variants and name == "mxfp4":
            report["variants"] = variants(store, max(args.threads), cpus, args)
        for threads in args.threads:
            report["results"].append(measure(store, threads, cpus, args))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
