"""Work of the classes that others lean on, from Llama 3 8B's and gpt-oss-120b's shapes by hand."""

from __future__ import annotations

from functools import cache

import pytest

from headrace.explain.catalogue.evaluate import setting, work_of
from headrace.explain.catalogue.load import load_catalogue
from headrace.explain.cost import Work

# Llama 3 8B in bfloat16, four sequences of 2,048 tokens
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, INNER, WORDS, BATCH, PAST = (
    *(4096, 32, 32, 8, 128),
    *(14336, 128256, 4, 2048),
)
QKV, OUT = WIDTH * HEAD * (HEADS + 2 * KV_HEADS), HEADS * HEAD * WIDTH
LINEAR = LAYERS * (QKV + OUT + 3 * WIDTH * INNER)
TABLE = WIDTH * WORDS
TOKEN = LAYERS * KV_HEADS * HEAD * 2 * 2  # bytes of a token's keys and values
PAIRS = 4 * HEADS * HEAD * LAYERS * PAST  # FLOPs of one query over its past
DENSE = {
    "qkv-projection": ("tensor", 2 * BATCH * LAYERS * QKV),
    "output-projection": ("tensor", 2 * BATCH * LAYERS * OUT),
    "dense-ffn": ("tensor", 2 * BATCH * LAYERS * 3 * WIDTH * INNER),
    "lm-head": ("tensor", 2 * BATCH * TABLE),
    "decode-attention": ("tensor", BATCH * PAIRS),
    "speculative-verify": ("tensor", 5 * BATCH * (2 * (LINEAR + TABLE) + PAIRS)),
    "decode-gemm": ("hbm", 2 * (LINEAR + TABLE)),
    "fct-batch1-step-cost-formula": ("hbm", 2 * (LINEAR + TABLE) + BATCH * TOKEN * (PAST + 1)),
    "kv-append": ("hbm", BATCH * TOKEN * 2),  # read as activations, written
    "kv-transfer": ("hbm", 2 * BATCH * TOKEN * 16),
    "paged-attention-block-table-kernel": (
        "hbm",
        BATCH * TOKEN * PAST + 4 * BATCH * PAST // 16 * LAYERS,
    ),
    "token-embedding": ("hbm", BATCH * WIDTH * 4),
    "sampling": ("hbm", 3 * BATCH * WORDS * 4),
    "quantization-overhead": ("hbm", (LINEAR + TABLE) * (0.5 + 2 / 128)),
    "structured-2-4-sparsity-mma-sp": ("hbm", LINEAR * (1 + 1 / 8)),
    "constrained-decoding-grammar-mask": ("hbm", BATCH * WORDS * (1 / 8 + 8)),
    "rope-rotation": ("vector", 3 * BATCH * LAYERS * (HEADS + KV_HEADS) * HEAD),
    "rmsnorm": ("vector", 4 * BATCH * WIDTH * (2 * LAYERS + 1)),
    "host-side-sampling-loop": ("pcie", BATCH * WORDS * 4),
}
# gpt-oss-120b: 36 layers of 128 experts of 3 x 2,880 x 2,880 in MXFP4, four a token; a quarter hits, half of
# the others are fetched
EXPERT = 3 * 2880 * 2880
CHOSEN = 36 * 4 * EXPERT
BYTES = CHOSEN * 17 / 32
OFFLOADED = {
    "moe-experts": (("tensor", 2 * CHOSEN * 0.625), ("hbm", BYTES * 0.625)),
    "expert-fetch": (("pcie", BYTES * 0.375), ("dram", BYTES * 0.375), ("hbm", BYTES * 0.375)),
    "cpu-expert-matvec": (("cpu", 2 * CHOSEN * 0.375), ("dram", BYTES * 0.375)),
    "moe-infinity-expert-cache-prefetch": (
        ("tensor", 2 * CHOSEN * 0.625),
        ("cpu", 2 * CHOSEN * 0.375),
        ("hbm", BYTES * (0.625 + 0.375)),
        ("pcie", BYTES * 0.375),
        ("dram", BYTES * 0.75),
    ),
}


@cache
def catalogue():
    return load_catalogue()


def amount(work: Work, resource: str) -> float:
    if resource == "tensor":
        return sum(work.tensor_flops.values())
    if resource == "cpu":
        return sum(work.cpu_flops.values())
    return work.vector_flops if resource == "vector" else work.bytes_by_resource()[resource]


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_s_step(name: str):
    at = setting(catalogue().symbols, "dense_decode", {"B": BATCH, "L": PAST})
    resource, wanted = DENSE[name]
    found = work_of(catalogue().records[name], at.values)
    assert amount(found, resource) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_experts(name: str):
    at = setting(catalogue().symbols, "offload", {"hit": 0.25, "f_cpu": 0.5})
    found = work_of(catalogue().records[name], at.values)
    for resource, wanted in OFFLOADED[name]:
        assert amount(found, resource) == pytest.approx(wanted, rel=1e-12), resource


def test_the_three_places_of_experts_add_up_to_their_step():
    """What hits and fetches read and write, what the CPU reads: the whole of moe-infinity's traffic."""
    at = setting(catalogue().symbols, "offload")
    parts = ("moe-experts", "expert-fetch", "cpu-expert-matvec")
    works = [work_of(catalogue().records[name], at.values) for name in parts]
    whole = work_of(catalogue().records["moe-infinity-expert-cache-prefetch"], at.values)
    for resource in ("tensor", "cpu", "hbm", "dram"):
        total = sum(amount(work, resource) for work in works)
        assert total == pytest.approx(amount(whole, resource), rel=1e-12), resource
