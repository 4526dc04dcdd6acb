"""What the interpreter accepts must also compile, here for a GPU that is not here (sm_90).

Attention is compiled in tests/unit/ops/test_compile_targets.py.
"""

from __future__ import annotations

import pytest

from tests.fixtures.triton_compile import cross_compile
from tests.fixtures.triton_interpreter import needs_triton

pytestmark = [needs_triton, pytest.mark.slow]

PACKAGE = "headrace.ops.triton"
SMALL = {"num_warps": 1, "num_stages": 4}
INT = ("num_tokens", "cols", "rows0", "rows1", "rows2", "stride0", "stride1", "stride2", "num_rows")
INT += ("gate_stride", "up_stride", "window", "heads", "group", "block_tokens", "dim", "half", "k")
INT += (
    "kv_heads",
    "stride_table",
    "stride_block",
    "stride_head",
    "num_sequences",
    "num_experts",
    "row_stride",
)
INT += ("gate_expert", "gate_row", "up_expert", "up_row", "down_expert", "down_row")
SINGLE = ("num_tokens", "heads", "group", "k", "num_sequences", "num_experts", "window", "kv_heads")
FLOAT = ("scale", "alpha", "limit", "eps")
TYPES = {
    **dict.fromkeys(INT, "i32"),
    **dict.fromkeys(FLOAT, "fp32"),
    **dict.fromkeys(("table", "w0", "w1", "w2", "gate", "up", "down", "keys", "values"), "*bf16"),
    **dict.fromkeys(("tables", "query_start", "context_lens"), "*i32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
}


AHEAD = dict.fromkeys(
    ("slot_of", "state", "foreseen", "place_of", "arrived", "homes"), "*i32"
) | {"layer": "i32", "totals": "*i64"}  # fmt: skip


GROUPED = {
    "PACKED": True, "SLICE_NBYTES": 2654208, "AT_CODES": 0, "AT_SCALES": 1658880, "AT_BIAS": 2642688,
    "HAS_BIAS": True, "HIDDEN": 2880, "WIDTH": 576, "S": 5,
}  # fmt: skip
GATE = {"CLAMPED": True, "ALPHA": 1.702, "LIMIT": 7.0}


def spec(
    module: str,
    kernel: str,
    constexprs: dict[str, object],
    *,
    warps: int = 4,
    stages: int = 3,
    **changes: str,
):
    """A kernel with the types of a bfloat16 model; what is not named is a float32 tensor."""
    signature = {**TYPES, **changes}
    return {
        "kernel": f"{PACKAGE}.{module}:{kernel}",
        "signature": signature,
        "constexprs": constexprs,
        "multiples": [name for name in INT if name not in SINGLE],
        "options": SMALL if module == "few_rows" else {"num_warps": warps, "num_stages": stages},
    }


# A packed matrix of 2,048 columns: strides of codes and of scales.
STRIDES = {"q4_k": (1152, 1152), "q6_k": (1536, 144), "iq4_xs": (1088, 1088)}


def packed_linear(name: str, tokens: int):
    (codes, scales), by_terms = STRIDES[name], name != "iq4_xs"
    return spec(
        "packed_few", "packed_linear_kernel",
        {"F0": name, "T0": by_terms, "CS0": codes, "SS0": scales, "COUNT": 1, "K": 2048,
         "TOKENS": tokens, "ROWS": 16, "COLS": 256, "SPLIT": 4 if by_terms else 1, "AHEAD": 2,
         "HAS_RESIDUAL": True}
        | dict.fromkeys(("F1", "F2"), "")
        | dict.fromkeys(("T1", "T2", "HAS_B0", "HAS_B1", "HAS_B2"), False)
        | dict.fromkeys(("CS1", "CS2", "SS1", "SS2"), 0),
        warps=8 if by_terms else 4, terms="*i32",
        **dict.fromkeys(("c0", "c1", "c2", "s0", "s1", "s2"), "*u8"),
    )  # fmt: skip


SPECS = [
    packed_linear("q4_k", 1),
    packed_linear("q6_k", 4),
    packed_linear("iq4_xs", 1),
    spec(
        "packed_many", "expand_kernel",
        {"CODE_STRIDE": 1152, "SCALE_STRIDE": 1152, "FORMAT": "q4_k", "K": 2048, "ROWS": 16,
         "COLS": 256},
        codes="*u8", scales="*u8", out="*bf16",
    ),
    spec(
        "packed_many", "packed_embed_kernel",
        {"CODE_STRIDE": 1536, "SCALE_STRIDE": 144, "FORMAT": "q6_k", "K": 2048, "ROWS": 1,
         "COLS": 256},
        warps=1, codes="*u8", scales="*u8", ids="*i64", count="i32",
    ),
    spec(
        "expert_grouped_blocks", "block_grouped_gate_up",
        {"SLICE_NBYTES": 921600, "AT_CODES": 0, "AT_SCALES": 0, "AT_FACTORS": 0, "AT_BIAS": 0,
         "CODE_STRIDE": 1152, "SCALE_STRIDE": 1152, "FORMAT": "q4_k", "FACTORS": 0,
         "HAS_BIAS": False, "HIDDEN": 2048, "WIDTH": 256, "S": 3, "CLAMPED": False, "ALPHA": 1.702,
         "LIMIT": 7.0, "ALONE": True, "ROWS": 64, "TOKENS": 128, "COLS": 64},
        warps=8, stages=2, arena="*u8", work="*i32", bounds="*i32", order="*i64", x="*bf16",
        h="*bf16", top_k="i32",
    ),
    spec("rows", "embed_kernel", {"BLOCK": 1024}, ids="*i64"),
    spec("rows", "rmsnorm_kernel", {"BLOCK": 4096, "PDL": True}),
    spec("rows", "rope_kernel", {"INTERLEAVED": False, "HEADS": 8, "HALF": 32}),
    spec(
        "rows", "rope_append_kernel", {"INTERLEAVED": False, "DIM": 64, "PDL": True},
        k="*fp32", v="*fp32",
    ),
    spec("rows", "rope_pair_kernel", {"INTERLEAVED": False, "DIM": 64, "PDL": True}, k="*fp32"),
    spec("rows", "kv_append_kernel", {"DIM": 64}, k="*fp32", v="*fp32"),
    spec(
        "router",
        "router_topk_kernel",
        {"SOFTMAX_FIRST": False, "NORMALIZE": True, "EXPERTS": 128, "K": 4},
        ids="*i32",
    ),
    spec(
        "router",
        "route_kernel",
        {"HAS_BIAS": True, "SOFTMAX_FIRST": False, "NORMALIZE": True, "EXPERTS": 128, "K": 4,
         "COLS": 4096, "PDL": True},
        ids="*i32", done="*i32", stride="i32",
    ),
    spec(
        "few_rows",
        "linear_kernel",
        dict.fromkeys(("HAS_B0", "HAS_B1", "HAS_B2", "HAS_RESIDUAL"), True)
        | {"TOKENS": 8, "ROWS": 16, "TILE": 256, "PDL": True},
        x="*bf16",
    ),
    spec(
        "few_rows_f32", "linear_f32_kernel",
        {"HAS_BIAS": True, "HAS_RESIDUAL": True, "TOKENS": 4, "ROWS": 1, "TILE": 1024},
        weight="*fp32", stride="i32",
    ),
    spec(
        "few_rows", "gated_kernel",
        {"CLAMPED": True, "TOKENS": 16, "ROWS": 16, "TILE": 256, "PDL": True},
        x="*bf16", out="*bf16",
    ),
    spec(
        "mixture",
        "pair_gated_kernel",
        {"HAS_BIAS": True, "CLAMPED": True, "ROWS": 16, "TILE": 256},
        ids="*i32",
    ),
    spec("mixture", "pair_down_kernel", {"HAS_BIAS": True, "ROWS": 16, "TILE": 256}, ids="*i32"),
    spec(
        "expert_gather", "expert_gather",
        {"GATHERING": 16, "SLICE_NBYTES": 3317760, "HOST_NBYTES": 3317760, "WORDS": 2048,
         "FIRST_SLOT": 2000,
         "MAX_PREFETCH": 4, "PROGRAMS": 16},
        **AHEAD, bases="*i64", arena="*u8", fetches="*i32", counts="*i32", origins="*i32",
    ),
    spec(
        "expert_foresight", "guess_logits",
        {"COLS": 2880, "HAS_BIAS": True, "ROWS": 2, "TILE": 1024}, weight="*bf16", stride="i32",
        scale="*fp32",
    ),
    *(
        spec(
            "expert_foresight", "expert_prefetch",
            {"TOKENS": tokens, "TOP_K": 4, "E": 128, "S": 5, "MAX_PREFETCH": 4,
             "HAS_VALID": tokens > 1, "N": 4 * tokens, "SP": 8, "EP": 128, "FIRST_SLOT": 2000,
             "SLICE_NBYTES": 2658304, "HOST_NBYTES": 2658304, "WORDS": 2048,
             "THREADS": 128},
            **AHEAD, guesses="*i32", valid="*i1", bases="*i64", arena="*u8",
        )
        for tokens in (1, 16)
    ),
    *(
        spec(
            "expert_grouped",
            name,
            {**GROUPED, **extra, "ALONE": alone, "ROWS": tile[0], "TOKENS": tile[1], "COLS": tile[2]},
            warps=tile[3], stages=tile[4], arena="*u8", work="*i32", bounds="*i32", order="*i64",
            x="*bf16", h="*bf16", y="*fp32" if alone else "*bf16", top_k="i32",
        )
        for name, extra in (("grouped_gate_up", GATE), ("grouped_down", {}))
        for alone in (False, True)
        for tile in ((64, 16, 64, 4, 3), (64, 64, 32, 4, 4), (64, 128, 32, 4, 3))
    ),
    spec(
        "expert_matvec",
        "expert_await",
        {"AT_ACK": 16, "AT_ABORT": 32, "STATE_SEQ": 2, "STATE_FAILED": 3, "SPINS": 5000000,
         "PDL": True},
        counts="*i32", state="*i32", block="*i32", totals="*i64",
    ),
]  # fmt: skip


# gpt-oss-120b in five slices; warps as ``expert_launch._warps`` shares them out.
SLICE = {
    "WHICH": 0, "SLICE_NBYTES": 2_670_848, "AT_SCALES": 1_658_880, "AT_BIAS": 1_762_560, "AT_CODES": 0,
    "HAS_BIAS": True, "HIDDEN": 2880, "WIDTH": 576, "S": 5, "WARPS": 2, "PDL": True,
}  # fmt: skip
LISTS = {
    **dict.fromkeys(("entries", "counts", "pair_token", "block"), "*i32"),
    **dict.fromkeys(("x_halves", "h_halves", "halves"), "*fp16"),
    **{"arena": "*u8", "scale_stride": "i32"},
}


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_expert_kernels_compile(capability: int):
    gate = {"CLAMPED": True, "ALPHA": 1.702, "LIMIT": 7.0, "CHUNKS": 6, "TILES": 4}
    once = {k: v for k, v in SLICE.items() if k != "WARPS"}
    specs = [
        spec("expert_loop", "loop_gate_up", {**once, **gate}, **LISTS),
        spec("expert_halves", "halves_down", {**SLICE, "WARPS_K": 1}, **LISTS),
        spec(
            "expert_halves", "expert_prepare",
            {"AT_X": 4, "AT_READY": 80, "L": 36, "HIDDEN": 2880, "COLS": 256, "MXFP4": True, "HAS_CPU": True,
             "NUMBERED": True, "PDL": True},
            **LISTS, state="*i32", layer="i32",
        ),
    ]  # fmt: skip
    results = cross_compile(specs, capability)
    assert not [r for r in results if "error" in r]
    # Weights stay in registers, and at least three programs fit on a multiprocessor of 65,536.
    assert all(r["spills"] <= 16 and r["registers"] <= 168 for r in results), results


def test_every_kernel_compiles_for_hopper():
    results = cross_compile(SPECS)
    assert not [r for r in results if "error" in r]
    for result in results:
        assert result["shared"] <= 227 * 1024, result  # what a block may have on sm_90
        assert result["spills"] == 0, result


PLAN_SIZES = {"L": 36, "E": 128, "S": 5, "SLOTS": 5000}
PLAN = {
    **PLAN_SIZES, "USES": 4, "TOP_K": 4, "MAX_FETCH": 20, "SPLIT": 21, "HAS_CPU": True,
    "AT_HEADER": 48, "AT_ITEMS": 64, "AT_TOKEN": 500, "AT_WEIGHT": 600, "N": 4, "SP": 8, "FP": 32,
    "WINDOW": 160, "WP": 256, "CHUNK": 256, "MAX_PREFETCH": 4, "PROGRAMS": 16, "SLICE_CHUNKS": 163,
    "THREADS": 256, "NUMBERED": True, "PDL": True,
}  # fmt: skip
FLOATS = ("weights_ptr", "counters", "values", "constants", "pair_weight")


def plan_spec(kernel: str, constexprs: dict[str, object], warps: int, **options: object):
    module = "expert_plan" if kernel == "expert_plan" else "expert_rank"
    names = ("ids_ptr slot_of owner_of last_use victims scratch split state counts hits fetches "
             "pair_token pair_of on_gpu place_of arrived origins homes block").split()  # fmt: skip
    types = {**dict.fromkeys(names, "*i32"), **dict.fromkeys(FLOATS, "*fp32")}
    return {
        "kernel": f"{PACKAGE}.{module}:{kernel}",
        "signature": {**types, "totals": "*i64", "layer": "i32"},
        "constexprs": constexprs,
        "options": {"num_warps": warps, "enable_fp_fusion": False, **options},
    }


def test_the_plan_compiles_for_hopper_without_fused_multiply_adds():
    """A fused one would not round as ``cache_policy`` does. Bounds on registers as in ``plan_layer``."""
    batch = {**PLAN, "USES": 64, "N": 64, "MAX_FETCH": 32, "SPLIT": 321}
    results = cross_compile([
        plan_spec("expert_plan", PLAN, 8, maxnreg=255),
        plan_spec("expert_plan", batch, 8, maxnreg=255),
        plan_spec("begin_step", {"ROWS": 36 * 128, "CHUNK": 256}, 4),
        plan_spec("rank_victims", {"S": 5, "SLOTS": 5000, "MINE": 8, "CHUNK": 512}, 4),
    ])  # fmt: skip
    assert not [r for r in results if "error" in r]
    for result in results:
        assert (result["fused"], result["spills"]) == (0, 0), result


CHOICE = {
    **dict.fromkeys(("keys", "masses", "state", "above", "sums", "tokens"), "*i64"),
    **dict.fromkeys(
        ("counters", "picked", "counts", "bases", "candidates", "ids", "equals"), "*i32"
    ),
    **{"rules": "*fp64", "vocab": "i32", "rows": "i32"},
}


@pytest.mark.parametrize("capability", [80, 90])
def test_the_choice_of_tokens_compiles(capability: int):
    chunks = {"CHUNK": 2048, "CHUNKS": 128, "PDL": capability >= 90}
    weights = {**chunks, "UNITS": 2.0**44, "ROOM": 2048}
    narrow = {**weights, "LANES": 256}
    kernels = [
        ("sample_best:best_kernel", chunks, 4),
        ("sample_narrow:narrow_kernel", {**narrow, "FIRST": True}, 8),
        ("sample_narrow:narrow_kernel", {**narrow, "FIRST": False}, 8),
        ("sample_finish:finish_kernel", weights, 8),
    ]
    specs = [
        {"kernel": f"{PACKAGE}.{name}", "signature": CHOICE, "constexprs": constants,
         "multiples": ["vocab"], "options": {"num_warps": warps}}
        for name, constants, warps in kernels
    ]  # fmt: skip
    results = cross_compile(specs, capability)
    assert not [r for r in results if "error" in r]
    assert all(r["spills"] <= 16 and r["registers"] <= 192 for r in results), results
