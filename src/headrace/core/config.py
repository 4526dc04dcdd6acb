"""The engine's configuration: frozen, validated where it is resolved (``engine.resolve``)."""

from __future__ import annotations

from dataclasses import dataclass

KV_FORMATS = ("auto", "f32", "bf16", "fp8", "nvfp4k-fp8v")
DEVICES = ("auto", "cpu", "cuda")
PACKED = "packed"  # matrices in blocks stay as they are stored
DENSE_FORMATS = ("bf16", "f16", "f32", PACKED)
EXPERT_MODES = ("auto", "gpu", "cpu", "stream", "hybrid")


@dataclass(frozen=True)
class EngineConfig:
    """What a user may choose. ``None`` means that ``engine.resolve`` chooses and records why."""

    model: str  # a directory, a .gguf file, a hub id or an alias
    context: int | None = None  # tokens a sequence may hold, prompt and answer together
    threads: int | None = None  # CPU worker threads, the calling thread included
    ram_budget_nbytes: int | None = None  # host memory to use at most
    vram_budget_nbytes: int | None = None  # GPU memory to use at most
    pin_budget_nbytes: int | None = None  # host memory to lock for the GPU at most
    expert_disk: str | None = None  # a folder for experts that host memory cannot hold
    kv_format: str | None = None  # one of KV_FORMATS
    experts: str = "auto"  # one of EXPERT_MODES
    expert_slots: int | None = None  # places for slices of experts in GPU memory
    block_tokens: int | None = None  # tokens per KV block: 16, 32, 64 or 128
    max_batch_tokens: int | None = None  # tokens per step, prefill and decode together
    max_num_seqs: int | None = None  # sequences that run at once
    kv_tokens: int | None = None  # tokens that the KV pool holds over all sequences
    prefix_cache: bool = True  # share the blocks of prompts that begin alike
    backend: str | None = None  # force one op back-end: "triton", "cpu" or "reference"
    device: str = "auto"  # one of DEVICES
    dense_format: str | None = None  # what a GPU keeps matrices in: one of DENSE_FORMATS
    repair_nan_scales: bool = False  # set NaN block scales to zero instead of refusing the file
