"""Figures of one RTX 5070 Ti: three engines with the same weights."""

from __future__ import annotations

from benchmarks.explain import world_conditions as c
from benchmarks.explain.world_rows import Row
from headrace.engine.plan_memory import VRAM_RESERVE_NBYTES, lay_out
from headrace.explain.step_cost import Placement

GIB = 2**30
GPT = "gpt-oss-120b"
DESKTOP = "RTX 5070 Ti, two channels of DDR5 (54.2 GB/s), PCIe 5.0 x16 (56.6 GB/s)"
DECODED = 256 // 2 + 100  # half of 256 output tokens, after a prompt that is not given: 100


def freetoken_desktop() -> float:
    spec = c.model(GPT, c.BF16)
    place = Placement(hit_rate=0.315, fetch_share=1.0)
    return 1 / c.decode_time(spec, c.desktop_5070_ti(), "freetoken", place, DECODED).seconds


def llamacpp_desktop(layers_on_cpu: int = 28) -> float:
    spec = c.model(GPT, c.Q8)
    place = Placement(hit_rate=1 - layers_on_cpu / spec.moe_layers)
    return 1 / c.decode_time(spec, c.desktop_5070_ti(), "llamacpp", place, DECODED).seconds


def ollama_desktop() -> float:
    """8 of 37 layers on the GPU: the 37th is the output head, which is filled last."""
    spec = c.model(GPT, c.BF16)
    share = 8 / spec.num_layers
    place = Placement(dense_on_gpu=share, head_on_gpu=False, hit_rate=share)
    return 1 / c.decode_time(spec, c.desktop_5070_ti(), "llamacpp", place, DECODED).seconds


def llamacpp_step() -> float:
    """Percent more tokens/s for two more layers' experts on the GPU, around 28 on the CPU."""
    return 100 * (llamacpp_desktop(28) / llamacpp_desktop(30) - 1)


def slots_in(nbytes: float) -> float:
    """Experts that fit beside everything else in ``nbytes`` of VRAM."""
    spec, machine = c.model(GPT, c.BF16), c.desktop_5070_ti()
    layout = lay_out(spec, machine, c.workload())
    others = layout.total("vram") - layout.used["vram"]["expert slots"]
    return (nbytes - others) // spec.expert_nbytes


def layers_in_vram(nbytes: float) -> float:
    """Whole layers, their cache included, that fit in ``nbytes`` beside the reserve."""
    spec = c.model(GPT, c.BF16)
    layer = spec.nbytes()["attention"] / spec.num_layers + spec.num_experts * spec.expert_nbytes
    layer += spec.kv_nbytes(4096, 16) / spec.num_layers
    return (nbytes - VRAM_RESERVE_NBYTES) // layer


def experts_left_for_cpu() -> float:
    """Layers whose experts do not fit in 16 GiB: what --n-cpu-moe has to be."""
    spec, machine = c.model(GPT, c.Q8), c.desktop_5070_ti()
    layout = lay_out(spec, machine, c.workload())
    per_layer = spec.num_experts * spec.expert_nbytes
    return spec.moe_layers - layout.used["vram"]["expert slots"] // per_layer


def desktop() -> list[Row]:
    src, off = (
        "desktop",
        (
            "28 layers that cost 1% each would be 28% of a token's time; the same post's 24.2 and 11.14 "
            "tok/s say that the CPU takes most of it"
        ),
    )
    return [
        Row(
            src,
            "speed",
            f"{GPT}, decode",
            DESKTOP,
            "FreeToken, every miss fetched, 31.5% hits (given)",
            "tok/s",
            42.42,
            freetoken_desktop,
            why="the fetches alone take 23.0 of the published 23.6 ms at 56.6 GB/s: nearly all of the "
            "weights read from VRAM would have to be hidden behind the link, which is not modelled (on our "
            "own server the same engine takes 1.28 times its fetches)",
        ),
        Row(
            src,
            "speed",
            f"{GPT}, decode",
            DESKTOP,
            "llama.cpp, experts of 28 of 36 layers on the CPU",
            "tok/s",
            24.20,
            llamacpp_desktop,
        ),
        Row(
            src,
            "speed",
            f"{GPT}, decode",
            DESKTOP,
            "Ollama, 8 of 37 layers on the GPU",
            "tok/s",
            11.14,
            ollama_desktop,
        ),
        Row(
            src,
            "ratio",
            f"{GPT}, two layers' experts more on the GPU",
            DESKTOP,
            "llama.cpp, 30 to 28 layers on the CPU",
            "% tok/s",
            2.0,
            llamacpp_step,
            why=off,
        ),
        Row(
            src,
            "memory",
            f"{GPT}, experts cached in 13.9 GB of VRAM",
            DESKTOP,
            "FreeToken",
            "experts",
            702,
            lambda: slots_in(13.9e9),
        ),
        Row(
            src,
            "memory",
            f"{GPT}, layers in 14.5 GB of VRAM",
            DESKTOP,
            "Ollama",
            "layers",
            8,
            lambda: layers_in_vram(14.5e9),
        ),
        Row(
            src,
            "memory",
            f"{GPT}, layers whose experts stay on the CPU",
            DESKTOP,
            "llama.cpp",
            "layers",
            28,
            experts_left_for_cpu,
        ),
        Row(
            src,
            "memory",
            f"{GPT}, weights",
            "-",
            "bfloat16 outside the experts",
            "GB",
            65,
            lambda: c.model(GPT, c.BF16).weights_nbytes / 1e9,
        ),
        Row(
            src,
            "memory",
            f"{GPT}, weights on disk (61 'GB', read as GiB)",
            "-",
            "the same",
            "GiB",
            61,
            lambda: c.model(GPT, c.BF16).weights_nbytes / GIB,
        ),
        Row(
            src,
            "memory",
            f"{GPT}, loaded with 4,096 tokens",
            DESKTOP,
            "Ollama",
            "GB",
            66,
            lambda: (
                (
                    c.model(GPT, c.BF16).weights_nbytes
                    + c.model(GPT).kv_nbytes(4096, 16)
                    + VRAM_RESERVE_NBYTES
                )
                / 1e9
            ),
        ),
        Row(
            src,
            "memory",
            "GLM-5.2, checkpoint",
            "-",
            "NVFP4 experts (assumed)",
            "GB",
            400,
            lambda: c.model("glm-5.2").file_nbytes / 1e9,
        ),
        Row(
            src,
            "memory",
            "DeepSeek-V4-Flash, checkpoint",
            "-",
            "FP4 experts, FP8 rest",
            "GB",
            167,
            lambda: c.model("deepseek-v4-flash").file_nbytes / 1e9,
        ),
    ]
