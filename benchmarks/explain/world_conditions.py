"""The conditions under which published figures were taken: models, machines, placements.

A machine differs from the catalogue only where the publication measured or states something; what it
leaves open is chosen by a rule that is written down here, never by what fits a figure:

- a host that is not described is the cheapest kind that holds the checkpoint: two channels of DDR5-5600
  up to 256 GB, eight channels of DDR5-5600 above;
- a checkpoint that is not named is the official one; where host memory cannot hold it, the official FP8
  one (8 GB laptops are sold with up to 64 GB, and 70 GB of bfloat16 do not fit that);
- routing: hit rates that are published are used as conditions, others come from the planner's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from headrace.core.config_library import bundled_model
from headrace.core.plan_spec import PlanSpec
from headrace.engine.plan_memory import Workload
from headrace.explain.engine_model import engine_model
from headrace.explain.leaf import ATTENTION_DECODE, ATTENTION_PREFILL
from headrace.explain.step_cost import KV_BITS, Placement, StepShape
from headrace.explain.step_time import StepTime, step_time
from headrace.machine.known import known_machine
from headrace.machine.profile import MachineProfile, Rate

MEASURED = "measured by the publication"
BF16 = dict.fromkeys(("attention", "embedding", "lm_head"), "bf16")
Q8 = dict.fromkeys(("attention", "embedding", "lm_head"), "q8_0")
FP8 = dict.fromkeys(("attention", "experts", "shared"), "fp8_e4m3")
MILLI = 1e3


def measured(machine: MachineProfile, **gbps: float) -> MachineProfile:
    """The machine with rates that the publication measured itself."""
    rates = {name: Rate(value, "GB/s", "alone", MEASURED) for name, value in gbps.items()}
    return replace(machine, rates={**machine.rates, **rates})


def desktop_5070_ti() -> MachineProfile:
    """RTX 5070 Ti, Ryzen 9 9900X, 128 GB of DDR5, PCIe 5.0 x16: 56.6 and 54.2 GB/s measured."""
    machine = known_machine("rtx-5070-ti+pcie5x16+ddr5-5600-dual+ram=128GiB")
    return measured(machine, pcie_h2d=56.6, dram_read=54.2)


def model(name: str, formats: Mapping[str, str] | None = None) -> PlanSpec:
    spec = bundled_model(name).spec()
    return spec.with_formats(formats) if formats else spec


def decode_time(
    spec: PlanSpec,
    machine: MachineProfile,
    engine: str,
    place: Placement,
    context: int,
    batch: int = 1,
) -> StepTime:
    """One decode step with ``context`` tokens cached in each of ``batch`` sequences."""
    shape = StepShape("decode", batch, 1, context)
    return step_time(spec, shape, place, machine, engine_model(engine))


def prefill_time(
    spec: PlanSpec, machine: MachineProfile, engine: str, place: Placement, prompt: int
) -> StepTime:
    """One prefill of a whole prompt."""
    shape = StepShape("prefill", 1, prompt, 0)
    return step_time(spec, shape, place, machine, engine_model(engine))


# SGLang on one B200 (MpFA, arXiv 2609.33135, section 7): CUDA graphs, no prefix reuse. Sequences that
# the cache admits follow from the memory that SGLang sets aside for weights and cache together.
# The share that SGLang sets aside by itself: 183,359 MiB less 1.5 for each of 16,384 tokens of a chunk, two
# for each of 512 sequences in graphs, 512 and 128 (its server_args, read 2026-11-30).
SGLANG_STATIC_SHARE = round(1 - (1.5 * 16384 + 2 * 512 + 512 + 128) / 183359, 3)
OUTPUT_TOKENS = 1024
KV_OF = {"fa4": "bf16", "flashinfer": "fp8", "mpfa": "nvfp4k-fp8v"}
LENGTHS = (16384, 32768, 65536, 131072)
LLAMA, QWEN = "llama-3.1-8b", "qwen3-14b"


def sglang_place(backend: str) -> Placement:
    return Placement(kv_format=KV_OF[backend])


def tpot_ms(name: str, backend: str, context: int, batch: int = 1) -> float:
    """Milliseconds between tokens; the cache is half-way through the answer."""
    time = decode_time(
        model(name),
        known_machine("b200"),
        f"sglang-{backend}",
        sglang_place(backend),
        context + OUTPUT_TOKENS // 2,
        batch,
    )
    return time.seconds * MILLI


def ttft_s(name: str, backend: str, context: int) -> float:
    return prefill_time(
        model(name), known_machine("b200"), f"sglang-{backend}", sglang_place(backend), context
    ).seconds


def admitted(name: str, backend: str, context: int) -> int:
    """Sequences of ``context`` and an answer that fit beside the weights."""
    spec = model(name)
    gpu = known_machine("b200").gpu
    assert gpu is not None
    room = gpu.memory_nbytes * SGLANG_STATIC_SHARE - spec.weights_nbytes
    return int(room // spec.kv_nbytes(context + OUTPUT_TOKENS, KV_BITS[KV_OF[backend]]))


def otps(name: str, backend: str, context: int, concurrency: int = 1) -> float:
    """Output tokens a second of ``concurrency`` requests that start together, prefilled in turn."""
    batch = max(1, min(concurrency, admitted(name, backend, context)))
    seconds = batch * ttft_s(name, backend, context)
    seconds += (OUTPUT_TOKENS - 1) * tpot_ms(name, backend, context, batch) / MILLI
    return batch * OUTPUT_TOKENS / seconds


def attention_share(phase: str, context: int) -> float:
    """Percent of a step's device time in attention: Llama 3.1 8B, BF16 FlashAttention-4, one B200."""
    spec, machine, place = model(LLAMA), known_machine("b200"), sglang_place("fa4")
    if phase == "prefill":
        time = prefill_time(spec, machine, "sglang-fa4", place, context)
        return 100 * time.seconds_of(ATTENTION_PREFILL) / time.seconds
    time = decode_time(spec, machine, "sglang-fa4", place, context)
    return 100 * time.seconds_of(ATTENTION_DECODE) / time.seconds


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def workload(context: int = 4096) -> Workload:
    return Workload(context, prompt=min(2048, context))
