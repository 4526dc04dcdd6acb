"""Attention kernels compiled for Hopper and Blackwell without one: which matrix instructions they get.

What Triton's compiler makes of ``tl.dot_scaled`` differs between its versions; docs/kernels.md has the
findings, and those of the pinned version are held here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.fixtures.lower_kernels import lowered, scaled_products
from tests.fixtures.triton_interpreter import needs_triton

pytestmark = [needs_triton, pytest.mark.slow]

ARCHITECTURES = ("sm_90", "sm_100", "sm_120")
KERNELS = ("decode_nvfp4k_fp8v", "decode_fp8", "decode_bf16", "prefill_nvfp4k_fp8v", "prefill_bf16")
# What a block of threads may have (CUDA C++ programming guide, technical specifications).
SHARED_NBYTES = {"sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
# Prefill is launched with smaller tiles where headrace.ops.triton.tuning has no row of its own.
SMALL = {"ROWS": 64, "num_warps": 4, "num_stages": 2}


@functools.lru_cache(maxsize=1)
def compiled() -> dict[tuple[str, str], dict[str, Any]]:
    wanted = [
        (name, arch, SMALL if name.startswith("prefill") and arch == "sm_120" else {})
        for arch in ARCHITECTURES
        for name in (*KERNELS, "seal_nvfp4k_fp8v")
    ]
    return {(n, a): made for (n, a, _), made in zip(wanted, lowered(wanted), strict=True)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_attention_kernel_compiles(arch: str):
    for name in (*KERNELS, "seal_nvfp4k_fp8v"):
        made = compiled()[name, arch]
        assert "error" not in made, (name, made)
        assert made["shared"] <= SHARED_NBYTES[arch], (name, made)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decoding_multiplies_by_8_columns_in_16_bits(arch: str):
    """Both products of the swapped decoding: keys and values as rows, heads as 8 columns."""
    for name in ("decode_nvfp4k_fp8v", "decode_fp8"):
        made = compiled()[name, arch]
        assert set(made["products"]) == {
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",  # sealed pages: QK and PV
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",  # values of the open page
        }
        # 64 keys of 128 channels on 4 warps: 8 products for QK, 8 for PV, 1 for residuals.
        products = 17 if "nvfp4" in name else 16
        assert products in [loop.get("HMMA") for loop in made["loops"]]
    assert compiled()["decode_bf16", arch]["products"] == [
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    ]


def test_decoding_asks_for_pages_before_it_waits_and_touches_them_after():
    """Before the kernel ahead has ended only lists are read (ld.global), and the cache asked for pages."""
    early = {"OVERLAPS": True}
    wanted = [
        ("decode_bf16", early | {"AHEAD": 128}),
        ("decode_fp8", early),
        ("decode_nvfp4k_fp8v", early),
    ]
    for made in lowered([(name, "sm_90", changes) for name, changes in wanted]):
        order = made["order"]
        assert order.index("prefetch.global.L2") < order.index("griddepcontrol.wait"), made
        for touch in ("st.global", "cp.async"):
            assert touch in order
            assert order.index(touch) > order.index("griddepcontrol.wait"), made


def test_prefill_gets_the_largest_products_of_each_architecture():
    wanted = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_120": "mma.sync"}
    for arch, kind in wanted.items():
        for name in ("prefill_nvfp4k_fp8v", "prefill_bf16"):
            products = compiled()[name, arch]["products"]
            assert products, (name, arch)
            assert all(p.startswith(kind) for p in products), (name, arch, products)


def test_tiles_of_a_laid_out_past_are_multiplied_whole_on_hopper():
    """The kernel in Gluon: 64 rows of a group of warps by 128 keys, scores and values alike."""
    wanted = [(name, "sm_90", {}) for name in ("prefill_tiles_bf16", "prefill_tiles_sealed")]
    plain, sealed = lowered(wanted)
    product = "wgmma.mma_async.sync.aligned.m64n128k16.f32"
    assert plain["products"] == [f"{product}.bf16.bf16"]
    assert sealed["products"] == [f"{product}.bf16.bf16", f"{product}.f16.f16"]
    for made in (plain, sealed):
        assert made["shared"] <= SHARED_NBYTES["sm_90"], made


def test_instructions_a_token_of_low_bit_decoding_on_hopper():
    """What binds there (docs/kernels.md): the prototype of swapped operands took 32 a token."""
    loops = [loop["total"] for loop in compiled()["decode_nvfp4k_fp8v", "sm_90"]["loops"]]
    assert min(abs(4 * total / 64 - 27) for total in loops) <= 2


FP4 = "kind::mxf4nvf4.block_scale"
# Triton 3.6.0: block-scaled NVFP4 or None where it does not compile.
FINDINGS = {
    ("nvfp4_x_nvfp4_m128", "sm_90"): None,
    ("nvfp4_x_nvfp4_m16", "sm_90"): None,
    ("bf16_x_nvfp4_m128", "sm_90"): None,
    ("nvfp4_x_nvfp4_m128", "sm_100"): "tcgen05.mma",
    ("nvfp4_x_nvfp4_m16", "sm_100"): None,
    ("bf16_x_nvfp4_m128", "sm_100"): None,
    ("nvfp4_x_nvfp4_m128", "sm_120"): "mma.sync.aligned.m16n8k64",
    ("nvfp4_x_nvfp4_m16", "sm_120"): "mma.sync.aligned.m16n8k64",
    ("bf16_x_nvfp4_m128", "sm_120"): None,
}


def test_what_the_compiler_makes_of_scaled_products():
    import triton

    if triton.__version__ != "3.6.0":
        pytest.skip(f"findings are of Triton 3.6.0, this is {triton.__version__}")
    for (case, arch), made in zip(FINDINGS, scaled_products(list(FINDINGS)), strict=True):
        kind = FINDINGS[case, arch]
        if kind is None:
            assert "error" in made, (case, arch, made)
        else:
            assert len(made["products"]) == 1, (case, arch, made)
            assert made["products"][0].startswith(kind), (case, arch, made)
            assert FP4 in made["products"][0], (case, arch, made)
