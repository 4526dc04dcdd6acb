"""Bytes that texts on vLLM, MXFP4, MpFA and FLOP classes give."""

from __future__ import annotations

from benchmarks.explain import world_conditions as c
from benchmarks.explain.world_rows import Row
from headrace.engine.plan import make_plan
from headrace.explain.step_cost import KV_BITS
from headrace.machine.known import known_machine

GPT = "gpt-oss-120b"


def least_gpu(name: str) -> float:
    """GB of VRAM that hold the model with 8,192 tokens of cache, reserve included."""
    plan = make_plan(c.model(name, c.BF16), known_machine("mi355x"), c.workload(8192))
    return plan.layout.total("vram") / 1e9


def memory() -> list[Row]:
    return [
        Row(
            "vllm",
            "memory",
            "OPT 13B, cache a token",
            "-",
            "float16",
            "KB (2^10)",
            800,
            lambda: c.model("opt-13b").kv_nbytes(1, 16) / 2**10,
        ),
        Row(
            "vllm",
            "memory",
            "OPT 13B, cache of 2,048 tokens",
            "-",
            "float16",
            "GB",
            1.6,
            lambda: c.model("opt-13b").kv_nbytes(2048, 16) / 1e9,
        ),
        Row(
            "page",
            "memory",
            "Llama 3.1 70B, cache a token",
            "-",
            "bfloat16",
            "bytes",
            327_680,
            lambda: c.model("llama-3.1-70b").kv_nbytes(1, 16),
        ),
        Row(
            "mxfp4",
            "memory",
            "gpt-oss-120b in about 80 GB",
            "-",
            "everything in VRAM",
            "GB",
            80,
            lambda: least_gpu(GPT),
            why="80 GB is the size of the GPU that it fits, not the bytes it takes",
        ),
        Row(
            "mxfp4",
            "memory",
            "gpt-oss-20b in 16 GB",
            "-",
            "everything in VRAM",
            "GB",
            16,
            lambda: least_gpu("gpt-oss-20b"),
        ),
        Row(
            "mxfp4",
            "ratio",
            "MXFP4 against bfloat16, bytes",
            "-",
            "experts",
            "x",
            4,
            lambda: 16 / c.model(GPT).bits("experts"),
        ),
        Row(
            "mxfp4",
            "ratio",
            "MXFP4 against FP8, bytes",
            "-",
            "experts",
            "x",
            2,
            lambda: 8 / c.model(GPT).bits("experts"),
        ),
        Row(
            "mpfa",
            "ratio",
            "cache, bfloat16 against NVFP4 keys and FP8 values",
            "-",
            "bytes",
            "x",
            2.56,
            lambda: KV_BITS["bf16"] / KV_BITS["nvfp4k-fp8v"],
        ),
        Row(
            "mpfa",
            "memory",
            "Qwen3 14B, requests of 64K that the cache admits",
            "one B200",
            "bfloat16 cache",
            "requests",
            11,
            lambda: c.admitted(c.QWEN, "fa4", 65536),
        ),
        Row(
            "mpfa",
            "memory",
            "Qwen3 14B, requests of 128K that the cache admits",
            "one B200",
            "bfloat16 cache",
            "requests",
            5,
            lambda: c.admitted(c.QWEN, "fa4", 131072),
        ),
    ]
