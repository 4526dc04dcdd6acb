"""Decoding attention on a GPU: our formats beside torch SDPA and FlashInfer (bars 03.1, 03.2, 03.5).

    PYTHONPATH=src python -m benchmarks.attention.decode [--sweep] [--quick] [--out FILE]

Prints a line for each configuration and the bars at the end; --out writes JSON, anew after each result.
Times are medians of replays of a CUDA graph whose operands rotate through more memory than the caches
hold, merging included; ``percent`` is of the read-only rate measured in the same run. --sweep times the
candidates of the tuning tables instead, at the bars' sizes, and prints the fastest of each.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.attention import gpu
from benchmarks.attention.gpu import DEVICE, DIM, HEADS, KV_HEADS
from headrace.core.kv_formats import FORMATS
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve
from headrace.ops.triton import attention_decode, sealed_decode, sealed_decode_cuda, tuning

SIZES = [(1, 131072), (8, 32768), (1, 65536), (8, 65536), (1, 8192), (16, 2048)]
PAGES = {"bf16": (32,), "fp8": (64, 128), "nvfp4k-fp8v": (64, 128)}
NO_RESIDUALS = ("nvfp4k-fp8v, R = 0", 64)  # what residuals are compared with, and its page


def ours(
    device: CudaDevice, peak: float, kv_format: str, size: Any, page: int, rank: int = gpu.RANK
) -> dict[str, Any]:
    sequences, context = size
    ops = resolve(("triton", "reference"))
    nbytes = gpu.cache_nbytes(kv_format, sequences * context, page, rank)
    q = torch.randn(sequences, HEADS, DIM, device=DEVICE)
    if FORMATS[kv_format].sealed:
        # The row's own page is not full: one row after the last full page.
        make = partial(gpu.sealed, kv_format, sequences, context + 1, page, 1, rank)
        attend = ops.sealed_attention_decode
    else:
        make = partial(gpu.paged, sequences, context, (KV_HEADS, DIM, page), 1)
        attend = ops.attention_decode
    sets = [make() for _ in range(gpu.copies(nbytes))]
    seconds = gpu.seconds_of(device, [partial(attend, q, *one, DIM**-0.5) for one in sets])
    gbps = nbytes / seconds / 1e9
    return {
        "us": round(seconds * 1e6, 2), "gbps": round(gbps, 1), "nbytes": nbytes,
        "percent": round(100 * gbps / peak, 1),
    }  # fmt: skip


def sdpa(device: CudaDevice, peak: float, backend: Any, size: Any) -> dict[str, Any]:
    sequences, context = size
    nbytes = gpu.cache_nbytes("bf16", sequences * context, 32)
    shape = (sequences, KV_HEADS, context, DIM)
    q = torch.randn(sequences, HEADS, 1, DIM, device=DEVICE, dtype=torch.bfloat16)
    works = []
    for _ in range(gpu.copies(nbytes)):
        k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        works.append(gpu.sdpa(backend, q, k, v, False))
    seconds = gpu.seconds_of(device, works)
    gbps = nbytes / seconds / 1e9
    return {
        "us": round(seconds * 1e6, 2), "gbps": round(gbps, 1), "percent": round(100 * gbps / peak, 1)
    }  # fmt: skip


def flashinfer(device: CudaDevice, peak: float, dtype: torch.dtype, size: Any) -> dict[str, Any]:
    import flashinfer  # pyright: ignore[reportMissingImports]

    sequences, context = size
    page = 16
    pages = sequences * context // page
    nbytes = 2 * pages * page * KV_HEADS * DIM * dtype.itemsize
    q = torch.randn(sequences, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    works = []
    for _ in range(gpu.copies(nbytes)):
        cache = torch.randn(pages, 2, page, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        work = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * (context // page),
            torch.randperm(pages, device=DEVICE).int(),
            torch.full((sequences,), page, device=DEVICE, dtype=torch.int32),
            HEADS, KV_HEADS, DIM, page, q_data_type=torch.bfloat16, kv_data_type=dtype,
        )  # fmt: skip
        works.append(partial(wrapper.run, q, cache.to(dtype)))
    seconds = gpu.seconds_of(device, works)
    gbps = nbytes / seconds / 1e9
    return {
        "us": round(seconds * 1e6, 2), "gbps": round(gbps, 1), "percent": round(100 * gbps / peak, 1)
    }  # fmt: skip


# One change each from what launches take: of the kernel in CUDA C++, of Triton's over pages as they are
# sealed and as they come. "programs": how many programs a row's parts are made for.
SHAPES: list[dict[str, Any]] = [
    {}, {"stages": 3}, {"stages": 2, "blocks": 2}, {"stages": 2, "blocks": 2, "max_parts": 128},
    {"warps": 8, "stages": 2, "max_parts": 128}, {"long_part": 16}, {"long_part": 4}, {"min_part": 4},
    {"min_part": 1}, {"overlaps": False},
]  # fmt: skip
CHANGES: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {}, {"num_warps": 8}, {"tile": 32, "num_stages": 7}, {"max_registers": 168},
        {"tile": 128, "num_stages": 3}, {"swapped": True, "tile": 128, "num_stages": 3},
    ],
    "sealed": [{}, {"max_registers": 128}, {"num_stages": 2, "max_registers": 128}],
}  # fmt: skip


@contextmanager
def launched(kind: str, change: dict[str, Any]) -> Iterator[None]:
    """Triton's launches of a kind with a change."""
    where = tuning.capability(DEVICE)
    row = tuning.DECODE.get((where, kind), tuning.DECODE[((0, 0), kind)])
    module = {"sealed": sealed_decode, "plain": attention_decode}[kind]
    fields = {k: v for k, v in change.items() if k != "programs"}
    programs = change.get("programs", module.PART_PROGRAMS)
    with (
        patch.dict(tuning.DECODE, {(where, kind): replace(row, **fields)}),
        patch.object(module, "PART_PROGRAMS", programs),
        patch.object(sealed_decode_cuda, "takes", lambda q, cache: False),
    ):
        yield


def sweep_cuda(run: gpu.Run) -> None:
    """Shapes of the kernel in CUDA C++, all compiled at once."""
    usual = sealed_decode_cuda.USUAL
    shapes = [replace(usual, **change) for change in SHAPES]
    with ThreadPoolExecutor(12) as pool:
        list(
            pool.map(
                partial(sealed_decode_cuda.binary, (9, 0), HEADS // KV_HEADS, gpu.RANK), shapes
            )
        )
    for change, shape in zip(SHAPES, shapes, strict=True):
        with patch.object(
            sealed_decode_cuda, "decode", partial(sealed_decode_cuda.decode, shape=shape)
        ):
            for size in (*SIZES[:2], *SIZES[4:]):
                about = {"op": "sweep", "kind": "cuda", "format": "nvfp4k-fp8v", "size": size}
                work = partial(ours, run.device, run.peak, "nvfp4k-fp8v", size, 64)
                run.attempt(about | {"change": change}, work)


def sweep(run: gpu.Run) -> None:
    """Times of every candidate, and the fastest of each kind, format and size."""
    sweep_cuda(run)
    for kind, formats in (("plain", ("bf16",)), ("sealed", ("nvfp4k-fp8v", "fp8"))):
        for change in CHANGES[kind]:
            with launched(kind, change):
                for kv_format in formats:
                    for size in SIZES[:3] if kind == "plain" else SIZES[:2]:
                        about = {"op": "sweep", "kind": kind, "format": kv_format, "size": size}
                        work = partial(
                            ours, run.device, run.peak, kv_format, size, PAGES[kv_format][0]
                        )
                        run.attempt(about | {"change": change}, work)
    for key in sorted({(r["kind"], r["format"], r["size"]) for r in run.results}):
        wanted = dict(zip(("kind", "format", "size"), key, strict=True))
        fastest = gpu.best(run.results, **wanted)
        if fastest is not None:
            print("fastest", *key, fastest["us"], fastest["change"], flush=True)


def bars(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Each bar's figure and what is wanted."""
    made: dict[str, Any] = {}
    for size, wanted in ((SIZES[0], 1.6), (SIZES[1], 1.7)):
        peer = gpu.best(results, op="peer", format="bf16", size=size)
        found = {f: gpu.best(results, op="ours", format=f, size=size) for f in PAGES}
        low, name = found["nvfp4k-fp8v"], f"03.1 batch {size[0]} at {size[1] // 1024}K, nvfp4k-fp8v"
        told = "" if peer is None else f" ({peer['name']})"
        made[f"{name} over the fastest bf16 peer{told}"] = {
            "found": gpu.ratio(peer, low), "wanted": wanted,
        }  # fmt: skip
        made[f"{name} over our fp8"] = {"found": gpu.ratio(found["fp8"], low), "wanted": 1.1}
        same = gpu.best(results, op="ours", format="nvfp4k-fp8v", page=NO_RESIDUALS[1], size=size)
        without = gpu.best(results, op="ours", format=NO_RESIDUALS[0], size=size)
        made[f"03.5 batch {size[0]} at {size[1] // 1024}K, time of R = 4 over R = 0, at most"] = {
            "found": gpu.ratio(same, without), "wanted": 1.05,
        }  # fmt: skip
    for r in results:
        if r["op"] == "ours" and r["format"] == "bf16" and r["size"][1] >= 65536:
            made[f"03.2 batch {r['size'][0]} at {r['size'][1] // 1024}K, bf16, percent of read rate"] = {
                "found": r.get("percent"), "wanted": 85,
            }  # fmt: skip
    return made


def measure(run: gpu.Run, sizes: list[tuple[int, int]]) -> None:
    """Ours and the peers at ``sizes``."""
    device, peak = run.device, run.peak
    for size in sizes:
        for kv_format, pages in PAGES.items():
            for page in pages:
                about = {"op": "ours", "format": kv_format, "page": page, "size": size}
                run.attempt(about, partial(ours, device, peak, kv_format, size, page))
        name, page = NO_RESIDUALS
        about = {"op": "ours", "format": name, "page": page, "size": size}
        run.attempt(about, partial(ours, device, peak, "nvfp4k-fp8v", size, page, 0))
        for name, backend in gpu.sdpa_backends():
            about = {"op": "peer", "name": name, "format": "bf16", "size": size}
            run.attempt(about, partial(sdpa, device, peak, backend, size))
        if importlib.util.find_spec("flashinfer") is not None:
            for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
                about = {"op": "peer", "name": "flashinfer", "format": name, "size": size}
                run.attempt(about, partial(flashinfer, device, peak, dtype, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time the tuning's candidates instead")
    parser.add_argument("--quick", action="store_true", help="the sizes of bar 03.1 only")
    parser.add_argument("--out", help="write a report in JSON, too")
    args = parser.parse_args()
    with torch.inference_mode():
        run = gpu.Run("attention_decode", CudaDevice(), args.out)
        if args.sweep:
            sweep(run)
        else:
            measure(run, SIZES[:2] if args.quick else SIZES)
        run.finish({} if args.sweep else bars(run.results))


if __name__ == "__main__":
    main()
