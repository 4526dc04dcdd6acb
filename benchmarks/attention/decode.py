"""Decoding attention on a GPU: our formats beside torch SDPA and FlashInfer (bars 03.1, 03.2).

    PYTHONPATH=src python -m benchmarks.attention.decode [--sweep] [--quick] [--out FILE]

Prints one JSON object. Times are medians of replays of a CUDA graph whose operands rotate through more
memory than the caches hold; ``percent`` is of the read-only rate measured in the same run. --sweep times
the candidates of the tuning table, too.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.attention import gpu
from benchmarks.attention.gpu import DEVICE, DIM, HEADS, KV_HEADS
from headrace.core.kv_formats import FORMATS
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve
from headrace.ops.triton import attention_decode, sealed_decode, tuning

SIZES = [(1, 131072), (8, 32768), (1, 65536), (8, 65536), (1, 8192), (16, 2048)]
PAGES = {"bf16": (32,), "fp8": (64, 128), "nvfp4k-fp8v": (64, 128)}


def ours(device: CudaDevice, peak: float, kv_format: str, size: Any, page: int) -> dict[str, Any]:
    sequences, context = size
    ops = resolve(("triton", "reference"))
    nbytes = gpu.cache_nbytes(kv_format, sequences * context, page)
    q = torch.randn(sequences, HEADS, DIM, device=DEVICE)
    if FORMATS[kv_format].sealed:
        # The row's own page is not full: one row after the last full page.
        make = partial(gpu.sealed, kv_format, sequences, context + 1, page, 1)
        attend = ops.sealed_attention_decode
    else:
        make = partial(gpu.paged, sequences, context, (KV_HEADS, DIM, page), 1)
        attend = ops.attention_decode
    sets = [make() for _ in range(gpu.copies(nbytes))]
    seconds = gpu.timed(device, [partial(attend, q, *one, DIM**-0.5) for one in sets])
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
    seconds = gpu.timed(device, works)
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
    seconds = gpu.timed(device, works)
    gbps = nbytes / seconds / 1e9
    return {
        "us": round(seconds * 1e6, 2), "gbps": round(gbps, 1), "percent": round(100 * gbps / peak, 1)
    }  # fmt: skip


def sweep(device: CudaDevice, peak: float, results: list[dict[str, Any]]) -> None:
    """The tuning table's candidates at the bars' sizes, one change from the table's row at a time."""
    where = tuning.capability(DEVICE)
    changes: dict[str, list[dict[str, Any]]] = {
        "sealed": [
            *({"max_registers": n} for n in (None, 96, 168)),
            {"num_warps": 8, "max_registers": None}, {"num_warps": 2, "max_registers": None},
            {"num_stages": 3}, {"programs": 256}, {"programs": 1024},
        ],
        "plain": [
            {"tile": 64}, {"num_stages": 2}, {"num_stages": 4}, {"num_warps": 8},
            {"max_registers": 128}, {"programs": 512}, {"programs": 1024},
        ],
    }  # fmt: skip
    modules = {"sealed": sealed_decode, "plain": attention_decode}
    for kind, formats in (("sealed", ("nvfp4k-fp8v", "fp8")), ("plain", ("bf16",))):
        row = tuning.DECODE.get((where, kind), tuning.DECODE[((0, 0), kind)])
        programs = modules[kind].PART_PROGRAMS
        for change in changes[kind]:
            fields = {k: v for k, v in change.items() if k != "programs"}
            tuning.DECODE[(where, kind)] = replace(row, **fields)
            modules[kind].PART_PROGRAMS = change.get("programs", programs)
            for kv_format in formats:
                for page in PAGES[kv_format][-1:]:
                    for size in SIZES[:2]:
                        about = {"op": "sweep", "format": kv_format, "page": page, "size": size}
                        work = partial(ours, device, peak, kv_format, size, page)
                        gpu.attempt(results, about | {"change": change}, work)
        tuning.DECODE[(where, kind)] = row
        modules[kind].PART_PROGRAMS = programs


def bars(results: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for size in SIZES[:2]:
        peers = [
            r for r in results if r["op"] == "peer" and r["size"] == size and r["format"] == "bf16"
        ]
        ours = {f: gpu.best(results, op="ours", format=f, size=size) for f in PAGES}
        low = ours["nvfp4k-fp8v"]
        made[f"03.1 batch {size[0]} at {size[1]}"] = {
            "over_best_bf16_peer": gpu.ratio(gpu.best(peers), low),
            "over_our_bf16": gpu.ratio(ours["bf16"], low),
            "over_our_fp8": gpu.ratio(ours["fp8"], low),
            "wanted": {"peer": 1.6 if size[0] == 1 else 1.7, "fp8": 1.1},
        }
    made["03.2 percent of the read rate, bf16, 64K and beyond"] = {
        f"batch {r['size'][0]} at {r['size'][1]}": r.get("percent")
        for r in results
        if r["op"] == "ours" and r["format"] == "bf16" and r["size"][1] >= 65536
    }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time the tuning's candidates, too")
    parser.add_argument("--quick", action="store_true", help="the sizes of bar 03.1 only")
    parser.add_argument("--out", help="write the report to a file, too")
    args = parser.parse_args()
    device = CudaDevice()
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        peak = gpu.read_rate(device)
        for size in SIZES[:2] if args.quick else SIZES:
            for kv_format, pages in PAGES.items():
                for page in pages:
                    about = {"op": "ours", "format": kv_format, "page": page, "size": size}
                    work = partial(ours, device, peak, kv_format, size, page)
                    gpu.attempt(results, about, work)
            for name, backend in gpu.sdpa_backends():
                about = {"op": "peer", "name": name, "format": "bf16", "size": size}
                gpu.attempt(results, about, partial(sdpa, device, peak, backend, size))
            if importlib.util.find_spec("flashinfer") is not None:
                for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
                    about = {"op": "peer", "name": "flashinfer", "format": name, "size": size}
                    gpu.attempt(results, about, partial(flashinfer, device, peak, dtype, size))
        if args.sweep:
            sweep(device, peak, results)
    gpu.write(gpu.report("attention_decode", device, peak, bars(results), results), args.out)


if __name__ == "__main__":
    main()
