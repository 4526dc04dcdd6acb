"""Figures of the FreeToken paper as a blog post gives them."""

from __future__ import annotations

from benchmarks.explain import world_conditions as c
from benchmarks.explain.world_rows import Row, ranged
from headrace.core.plan_spec import PlanSpec
from headrace.engine.plan import fetch_share, hit_rate
from headrace.engine.plan_memory import lay_out
from headrace.explain.engine_model import engine_model
from headrace.explain.step_cost import Placement
from headrace.machine.known import known_machine
from headrace.machine.profile import MachineProfile

QWEN_MOE, FLASH, GLM = "qwen3.6-35b-a3b", "deepseek-v4-flash", "glm-5.2"
AGENT_CONTEXT = 16384  # agents' contexts are not given; half of 32K


def rtx_5090() -> MachineProfile:
    return c.measured(known_machine("rtx-5090+pcie5x16+ddr5-5600-dual+ram=256GiB"), pcie_h2d=52.7)


def freetoken(spec: PlanSpec, machine: MachineProfile, hits: float | None = None) -> float:
    """Tokens a second with the published hit rate, or the planner's."""
    if hits is None:
        hits = hits_of(spec, machine)
    share = fetch_share(machine, engine_model("freetoken"))
    place = Placement(hit_rate=hits, fetch_share=share)
    return 1 / c.decode_time(spec, machine, "freetoken", place, AGENT_CONTEXT).seconds


def resident(spec: PlanSpec, machine: MachineProfile) -> float:
    return lay_out(spec, machine, c.workload(2 * AGENT_CONTEXT)).resident


def hits_of(spec: PlanSpec, machine: MachineProfile) -> float:
    """The planner's, for this engine's cache."""
    return hit_rate(spec, resident(spec, machine), engine_model("freetoken")).expected


def llamacpp_pro_6000() -> float:
    """As many layers' experts on the GPU as fit."""
    spec, machine = c.model(GLM), known_machine("rtx-pro-6000")
    place = Placement(hit_rate=resident(spec, machine))
    return 1 / c.decode_time(spec, machine, "llamacpp", place, AGENT_CONTEXT).seconds


def streamed_pool_s() -> float:
    """Prefill of one long chunk with nothing resident: the pool travels once."""
    place = Placement(hit_rate=0.0, fetch_share=1.0)
    return c.prefill_time(c.model(QWEN_MOE), rtx_5090(), "freetoken", place, 2048).seconds


def q_star(machine: MachineProfile, misses: int = 4) -> float:
    """Whole experts to fetch."""
    return round(misses * fetch_share(machine, engine_model("freetoken")))


def freetoken_paper() -> list[Row]:
    src, box = "freetoken", "RTX 5090, desktop (host not described)"
    small = "faster than the real engine: contexts, and what runs beside a layer, are not given"
    hits = "the hit-rate model is calibrated on another model; agents repeat themselves more"
    laptop = known_machine("rtx-4060-laptop+pcie4x8+ddr5-5600-dual+ram=64GiB")
    pro = known_machine("rtx-pro-6000")
    return [
        ranged(
            77,
            83,
            Row(
                src,
                "speed",
                "Qwen3.6-35B-A3B, decode",
                box,
                "FreeToken, 16% misses (given)",
                "tok/s",
                0.0,
                lambda: freetoken(c.model(QWEN_MOE), rtx_5090(), 0.84),
                why=small,
            ),
        ),
        ranged(
            22,
            25,
            Row(
                src,
                "speed",
                "DeepSeek-V4-Flash, decode",
                box,
                "FreeToken, 39% misses (given)",
                "tok/s",
                0.0,
                lambda: freetoken(c.model(FLASH), rtx_5090(), 0.61),
                why=small,
            ),
        ),
        Row(
            src,
            "speed",
            "Qwen3.6-35B-A3B in FP8, decode",
            "RTX 4060 laptop, 8 GB",
            "FreeToken, hit rate by the model",
            "tok/s",
            39.3,
            lambda: freetoken(c.model(QWEN_MOE, c.FP8), laptop),
        ),
        Row(
            src,
            "speed",
            "GLM-5.2 (753B), decode",
            "RTX PRO 6000, 512 GiB",
            "FreeToken, hit rate by the model",
            "tok/s",
            14.9,
            lambda: freetoken(c.model(GLM), pro),
        ),
        Row(
            src,
            "speed",
            "GLM-5.2 (753B), decode",
            "RTX PRO 6000, 512 GiB",
            "llama.cpp, as many layers' experts on the GPU as fit",
            "tok/s",
            7.3,
            llamacpp_pro_6000,
            why="its CPU kernels do not keep up with eight channels (41 of 73 to 86 GB/s on our own server)",
        ),
        Row(
            src,
            "speed",
            "Qwen3.6-35B-A3B, prefill that streams the pool",
            box,
            "64 GB at 52.7 GB/s",
            "s",
            64 / 52.7,
            streamed_pool_s,
        ),
        Row(
            src,
            "memory",
            "Qwen3.6-35B-A3B, expert pool",
            "-",
            "bfloat16",
            "GB",
            64,
            lambda: c.model(QWEN_MOE).nbytes()["experts"] / 1e9,
        ),
        Row(
            src,
            "memory",
            "GLM-5.2 (753B), checkpoint",
            "-",
            "NVFP4 experts",
            "GB",
            433,
            lambda: c.model(GLM).file_nbytes / 1e9,
        ),
        Row(
            src,
            "ratio",
            "Qwen model, misses",
            box,
            "llama.cpp, whole layers resident",
            "%",
            62,
            lambda: 100 * (1 - resident(c.model(QWEN_MOE), rtx_5090())),
        ),
        Row(
            src,
            "ratio",
            "DeepSeek-V4-Flash, misses",
            box,
            "llama.cpp, whole layers resident",
            "%",
            89,
            lambda: 100 * (1 - resident(c.model(FLASH), rtx_5090())),
        ),
        Row(
            src,
            "ratio",
            "Qwen model, misses",
            box,
            "FreeToken, LRU",
            "%",
            16,
            lambda: 100 * (1 - hits_of(c.model(QWEN_MOE), rtx_5090())),
            why=hits,
        ),
        Row(
            src,
            "ratio",
            "DeepSeek-V4-Flash, misses",
            box,
            "FreeToken, LRU",
            "%",
            39,
            lambda: 100 * (1 - hits_of(c.model(FLASH), rtx_5090())),
            why=hits,
        ),
        Row(
            src,
            "ratio",
            "q* of 4 misses",
            "RTX 4060 laptop",
            "FreeToken",
            "experts",
            1,
            lambda: q_star(laptop),
        ),
    ]
