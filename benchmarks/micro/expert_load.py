"""How fast experts come into host memory: bar 02.7 (30 GB in at most 15 s).

    PYTHONPATH=src python -m benchmarks.micro.expert_load --folder /tmp/experts --gigabytes 30

Writes files laid out as gpt-oss checkpoints are (interleaved gate and up, codes and scales apart), maps
them, and loads them into a pinned store. Right after writing the page cache holds them (``warm``);
``--cold-gigabytes`` repeats a part with the cache dropped. The yardstick is a loop in which as many
threads read the same bytes of a fresh map. Prints one JSON object; rates in 10^9 bytes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.checkpoint.mapped import MappedFile
from headrace.experts.random_store import random_store
from headrace.experts.slab import slab_layout
from headrace.experts.store import HostStore, build_store
from headrace.formats.base import PackedTensor
from headrace.machine.pages import HostBlock, huge_nbytes
from headrace.machine.pinned import cuda_round_trip
from headrace.ops.records import ExpertWeights

SIZE, EXPERTS = 2880, 128  # gpt-oss-120b
PIECE = 8 << 20
# Part -> rows of one expert, bytes of a row.
PARTS = {
    "gate_up": (2 * SIZE, SIZE // 2),
    "gate_up_scales": (2 * SIZE, SIZE // 32),
    "down": (SIZE, SIZE // 2),
    "down_scales": (SIZE, SIZE // 32),
}


def layer_nbytes(experts: int) -> int:
    return sum(rows * row for rows, row in PARTS.values()) * experts


def write_layers(folder: Path, layers: int, experts: int, threads: int, limit_s: float) -> int:
    """Write one file a layer; how many there are when the time is over."""
    folder.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(1).integers(0, 250, PIECE, np.uint8).data
    start, size = time.perf_counter(), layer_nbytes(experts)

    def write(layer: int) -> bool:
        if time.perf_counter() - start > limit_s:
            return False
        with (folder / f"layer{layer}").open("wb", buffering=0) as file:
            for at in range(0, size, PIECE):
                file.write(data[: min(PIECE, size - at)])
        return True

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(write, range(layers)))


def map_layer(path: Path, experts: int) -> ExpertWeights:
    """A layer as the loader makes it: views of a fresh map."""
    file, offset, parts = MappedFile(path), 0, {}
    for name, (rows, row) in PARTS.items():
        parts[name] = torch.from_numpy(file.view(offset, (experts, rows, row), np.uint8))
        offset += experts * rows * row
    gate, up, down = [], [], []
    for e in range(experts):
        both, scales = parts["gate_up"][e], parts["gate_up_scales"][e]
        for place, to in enumerate((gate, up)):
            part = {"codes": both[place::2], "scales": scales[place::2]}
            to.append(PackedTensor("mxfp4", (SIZE, SIZE), part))
        part = {"codes": parts["down"][e], "scales": parts["down_scales"][e]}
        down.append(PackedTensor("mxfp4", (SIZE, SIZE), part))
    zero = torch.zeros(experts, SIZE)
    return ExpertWeights(gate, up, down, zero, zero, zero)


def read_loop(paths: list[Path], threads: int) -> float:
    """GB/s of threads that read every byte of fresh maps."""
    files = [MappedFile(path) for path in paths]
    pieces = [f.bytes[at : at + PIECE] for f in files for at in range(0, f.nbytes, PIECE)]
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda p: p[: p.size // 8 * 8].view(np.uint64).max(), pieces):
            pass
    return sum(f.nbytes for f in files) / (time.perf_counter() - start) / 1e9


def drop_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(paths: list[Path], experts: int, threads: int, pin: bool) -> dict[str, Any]:
    layout = slab_layout("mxfp4", SIZE, SIZE, has_bias=True)
    layers = [map_layer(path, experts) for path in paths]
    start = time.perf_counter()
    store = build_store(layers, [layout] * len(layers), threads=threads, pin=pin)
    seconds = time.perf_counter() - start
    source = len(paths) * layer_nbytes(experts)
    result = report(store, seconds)
    result["read_gbps"] = round(source / max(store.times.wall_s("read"), 1e-9) / 1e9, 1)
    if pin and torch.cuda.is_available():
        result["copies_checked_nbytes"] = store.check_copies(cuda_round_trip)
    start = time.perf_counter()
    store.close()
    return result | {"close_s": round(time.perf_counter() - start, 2)}


def report(store: HostStore, seconds: float) -> dict[str, Any]:
    times, account = store.times, store.account()
    blocks = [layer.memory for layer in store._layers if isinstance(layer.memory, HostBlock)]
    huge = [huge_nbytes(block) for block in blocks[:2]]
    return {
        "gigabytes": round(times.nbytes / 1e9, 2),
        "seconds": round(seconds, 2),
        "gbps": round(times.nbytes / seconds / 1e9, 2),
        "wall_s": {part: round(times.wall_s(part), 2) for part in sorted(times.thread_s)},
        "pinned_gigabytes": round(account.pinned_nbytes / 1e9, 2),
        "huge_share": round(
            sum(h or 0 for h in huge) / max(1, len(huge)) / store.layer_nbytes(0), 3
        ),
        "notes": store.notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=30.0)
    parser.add_argument("--cold-gigabytes", type=float, default=0.0)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write-limit-s", type=float, default=60.0)
    parser.add_argument("--only", choices=("write", "load"))
    parser.add_argument("--no-pin", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layers = max(1, round(args.gigabytes * 1e9 / layer_nbytes(args.experts)))
    if args.only != "load":
        start = time.perf_counter()
        count = write_layers(args.folder, layers, args.experts, args.threads, args.write_limit_s)
        seconds = time.perf_counter() - start
        print(f"wrote {count} of {layers} layers in {seconds:.1f} s", flush=True)
    if args.only == "write":
        return
    size = layer_nbytes(args.experts)
    every = sorted(args.folder.glob("layer*"), key=lambda p: int(p.name[5:]))
    paths = [p for p in every[:layers] if p.stat().st_size == size]
    pin = torch.cuda.is_available() and not args.no_pin
    if pin:
        torch.zeros(1, device="cuda")
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.node(),
        "threads": args.threads,
        "warm": {"read_loop_gbps": round(read_loop(paths, args.threads), 1)},
    }
    result["warm"] |= load(paths, args.experts, args.threads, pin)
    print(json.dumps(result), flush=True)
    cold = paths[: round(args.cold_gigabytes * 1e9 / size)]
    if cold:
        drop_cache(cold)
        loop = read_loop(cold, args.threads)
        drop_cache(cold)
        result["cold"] = {"read_loop_gbps": round(loop, 2)}
        result["cold"] |= load(cold, args.experts, args.threads, False)
    layout = slab_layout("mxfp4", SIZE, SIZE, has_bias=True)
    start = time.perf_counter()
    store = random_store(layout, len(paths), args.experts, seed=1, threads=args.threads, pin=pin)
    result["random"] = report(store, time.perf_counter() - start)
    store.close()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
