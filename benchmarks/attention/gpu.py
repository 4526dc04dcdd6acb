"""What the attention benchmarks share: random caches on a GPU, peers, timing, the report."""

from __future__ import annotations

import json
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.micro.gpu_ops import DEVICE, copies, paged, read_rate, timed
from headrace.core.kv_formats import FIRST_TOKENS, FORMATS
from headrace.machine.device import CudaDevice
from headrace.ops.records import AttentionBatch, LayerKV, OpenBatch, SealedKV

__all__ = ["DEVICE", "copies", "paged"]

CALLS = 12  # of an operation in a graph, at least
HEADS, KV_HEADS, DIM, RANK = 32, 8, 128, 4  # Llama 3 8B and many others
Cache = LayerKV | SealedKV


def sealed(
    kv_format: str, sequences: int, context: int, page: int, rows: int, rank: int = RANK
) -> tuple[SealedKV, AttentionBatch]:
    """Sequences of random sealed pages, the last ``rows`` positions of each being the step's.

    Codes are random but for NaN, scales within what real keys have; pages lie in random order.
    """
    made = FORMATS[kv_format]
    nvfp4 = made.keys == "nvfp4"
    pages = -(-context // page)
    blocks = sequences * pages

    def codes(*shape: int, low: int = 0, high: int = 0x7F) -> torch.Tensor:
        size = (blocks, KV_HEADS, *shape)
        made = torch.randint(low, high, size, device=DEVICE, dtype=torch.uint8)
        if low:
            return made
        return made | torch.randint(0, 2, size, device=DEVICE, dtype=torch.uint8) << 7

    width = pages - (context - rows) // page
    opened = (width * sequences, KV_HEADS, page, DIM)
    scales = torch.full((blocks, KV_HEADS, 2), 2.0**-10, device=DEVICE)
    cache = SealedKV(
        key_codes=codes(page, DIM // 2 if nvfp4 else DIM),
        key_scales=codes(page, DIM // 16, low=0x40, high=0x60) if nvfp4 else None,
        key_residuals=codes(page, rank, low=0x08, high=0x20) if nvfp4 and rank else None,
        key_refs=torch.randn(blocks, KV_HEADS, DIM, device=DEVICE).bfloat16() if nvfp4 else None,
        value_codes=codes(DIM, page),
        page_scales=scales,
        first_keys=(
            torch.randn(blocks, KV_HEADS, FIRST_TOKENS, DIM, device=DEVICE).bfloat16()
            if nvfp4
            else None
        ),
        directions=(
            torch.randn(KV_HEADS, rank, DIM, device=DEVICE) / DIM**0.5 if nvfp4 and rank else None
        ),
        open_keys=torch.randn(opened, device=DEVICE).bfloat16(),
        open_values=torch.randn(opened, device=DEVICE).bfloat16(),
        num_shared=width * sequences,
        open_offset=0,
    )
    order = torch.randperm(blocks, device=DEVICE).int().view(sequences, pages)
    slots = torch.arange(width * sequences, device=DEVICE, dtype=torch.int32)
    batch = AttentionBatch(
        query_start=torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * rows,
        context_lens=torch.full((sequences,), context, device=DEVICE, dtype=torch.int32),
        block_tables=order,
        positions=torch.arange(context - rows, context, device=DEVICE).repeat(sequences),
        slots=torch.zeros(sequences * rows, device=DEVICE, dtype=torch.int64),
        decode=rows == 1,
        open=OpenBatch(
            torch.zeros(sequences * rows, device=DEVICE, dtype=torch.int64),
            slots.view(sequences, width),
            torch.zeros((0, 3), device=DEVICE, dtype=torch.int32),
        ),
    )
    return cache, batch


def cache_nbytes(kv_format: str, tokens: int, page: int, rank: int = RANK) -> int:
    """Bytes of full pages that attention reads for ``tokens``."""
    made = FORMATS[kv_format]
    rank = rank if made.max_rank else 0
    return tokens // page * KV_HEADS * made.page_nbytes(page, DIM, rank)


def sdpa_backends() -> Iterator[tuple[str, Any]]:
    """torch SDPA's back-ends by name."""
    from torch.nn.attention import SDPBackend

    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        yield f"sdpa_{name.split('_')[0].lower()}", getattr(SDPBackend, name)


def sdpa(backend: Any, q: Any, k: Any, v: Any, causal: bool) -> Callable[[], torch.Tensor]:
    """One call; key heads are repeated for back-ends that cannot group queries."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    def grouped() -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v, is_causal=causal, enable_gqa=True)

    try:
        grouped()
        return grouped
    except RuntimeError:
        group = q.shape[1] // k.shape[1]
        wide = [x.repeat_interleave(group, 1) for x in (k, v)]

        def repeated() -> torch.Tensor:
            with sdpa_kernel(backend):
                return attend(q, *wide, is_causal=causal)

        repeated()
        return repeated


class Run:
    """Results of one run: each is printed and written as soon as it is there."""

    def __init__(self, name: str, device: CudaDevice, out: str | None) -> None:
        self.results: list[dict[str, Any]] = []
        self.device = device
        self.peak = read_rate(device)
        self._name, self._out = name, out
        print(f"read-only rate {self.peak:.0f} GB/s, {device.name}", flush=True)

    def attempt(self, about: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
        """Add what ``work`` returns, or why it failed: one failure must not cost the other figures."""
        try:
            found = about | work()
        except Exception as error:
            found = about | {"error": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
        self.results.append(found)
        print("  ".join(f"{k}={v}" for k, v in found.items()), flush=True)
        self.write({})
        torch.cuda.empty_cache()

    def write(self, bars: Any) -> None:
        if self._out is None:
            return
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        made = {
            "benchmark": self._name,
            "commit": commit.stdout.strip(),
            "gpu": self.device.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "heads": f"{HEADS}:{KV_HEADS} x {DIM}",
            "read_gbps": round(self.peak, 1),
            "bars": bars,
            "results": self.results,
        }
        Path(self._out).write_text(json.dumps(made, indent=2) + "\n")

    def finish(self, bars: dict[str, Any]) -> None:
        """Print the bars plainly, one a line: found and wanted."""
        self.write(bars)
        for name, value in bars.items():
            print(f"{name}: found {value['found']}, wanted {value['wanted']}", flush=True)


def seconds_of(device: CudaDevice, works: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one of ``works``; so many in a graph that its own start does not count."""
    return timed(device, list(works) * -(-CALLS // len(works)))


def best(results: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The fastest of the results with these values, None if there is none."""
    found = [r for r in results if "us" in r and all(r.get(k) == v for k, v in wanted.items())]
    return min(found, key=lambda r: r["us"], default=None)


def ratio(a: dict[str, Any] | None, b: dict[str, Any] | None) -> float | None:
    """How many times faster ``b`` is than ``a``."""
    return None if a is None or b is None else round(a["us"] / b["us"], 3)
