"""What one change buys, and what to do where a model does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.core.config_library import bundled_model, bundled_names
from headrace.core.errors import HeadraceError
from headrace.core.plan_spec import KINDS, PlanSpec
from headrace.engine.plan import Plan, make_plan, with_rate
from headrace.engine.plan_memory import Layout, Workload, fewer_at_once, lay_out
from headrace.explain.step_cost import KV_BITS
from headrace.explain.units_text import figures
from headrace.machine.profile import MachineProfile

MORE_VRAM_NBYTES = 8 * 10**9
MORE_RAM_NBYTES = 32 * 10**9  # one more pair of modules of 16 GB
# Formats that a checkpoint could be stored in instead: what is tried first costs least accuracy.
SMALLER = ("fp8_e4m3", "q4_k", "q3_k", "q2_k")
SHORTEST_CONTEXT = 1024
MAX_ALTERNATIVES = 4


@dataclass(frozen=True)
class Change:
    """One change, the plan that it makes, and tokens/s against before (None: did not run)."""

    name: str
    plan: Plan
    factor: float | None


def changes(plan: Plan) -> list[Change]:
    """Every change that is possible here, the most useful first."""
    found: list[Change] = []
    for name, again in _changed(plan):
        try:
            other = again()
        except HeadraceError:  # a machine without that rate, a context that cannot be halved
            continue
        before, after = plan.speed, other.speed
        if after is None:
            continue
        factor = after.tokens_s.expected / before.tokens_s.expected if before else None
        found.append(Change(name, other, factor))
    return sorted(found, key=lambda change: -(change.factor or 0.0))


def _changed(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    spec, machine, work = plan.spec, plan.machine, plan.workload

    def on(other: MachineProfile) -> Callable[[], Plan]:
        return lambda: make_plan(spec, other, work)

    def under(other: Workload) -> Callable[[], Plan]:
        return lambda: make_plan(spec, machine, other)

    gpu = machine.gpu
    if gpu is not None:
        bigger = replace(gpu, memory_nbytes=gpu.memory_nbytes + MORE_VRAM_NBYTES)
        shared = gpu.unified
        yield f"+8 GB of {'memory' if shared else 'VRAM'}", on(replace(machine, gpu=bigger))
        if "hbm_read" in machine.rates:
            name = "memory twice as fast" if shared else "VRAM twice as fast"
            rates = ("hbm_read", "dram_read") if shared else ("hbm_read",)
            yield name, on(_faster(machine, rates))
        if "pcie_h2d" in machine.rates and not shared:
            yield "link twice as fast", on(with_rate(machine, "pcie_h2d", 2.0))
    if "dram_read" in machine.rates and not (gpu is not None and gpu.unified):
        yield "twice the memory channels", on(with_rate(machine, "dram_read", 2.0))
    if plan.layout.mode in ("disk", "none") and not (gpu is not None and gpu.unified):
        more = replace(machine.host, memory_nbytes=machine.host.memory_nbytes + MORE_RAM_NBYTES)
        yield "+32 GB of host memory", on(replace(machine, host=more))
    if plan.layout.mode == "disk" and "disk_read" in machine.rates:
        yield "disk twice as fast", on(with_rate(machine, "disk_read", 2.0))
    for name in ("bf16", "fp8", "nvfp4k-fp8v"):
        if KV_BITS[plan.layout.kv_format] > KV_BITS[name]:
            smaller = replace(work, kv_format=name, kv_on_cpu="")
            yield f"KV cache in {name}", under(smaller)
    if work.concurrency > 1:
        fewer = work.concurrency // 2
        yield f"half the sequences ({fewer:,})", under(replace(work, concurrency=fewer))
    half = work.context // 2
    if half >= 1:
        shorter = replace(work, context=half, prompt=min(work.prompt, half))
        yield f"half the context ({half:,})", under(shorter)


def _faster(machine: MachineProfile, names: tuple[str, ...]) -> MachineProfile:
    """With twice each of these rates that it has."""
    for name in names:
        if name in machine.rates:
            machine = with_rate(machine, name, 2.0)
    return machine


def alternatives(plan: Plan) -> list[str]:
    """What comes nearest to a plan that does not fit memory; at most ``MAX_ALTERNATIVES`` sentences."""
    found: list[str] = []
    for say in (_shorter, _fewer, _smaller_formats, _more_memory, _other_models):
        found += say(plan)
    return found[:MAX_ALTERNATIVES]


def faster_ways(plan: Plan) -> list[str]:
    """What would bring a model that runs into the GPU's memory whole: the format that costs least."""
    gpu = plan.machine.gpu
    if gpu is None or plan.speed is None or plan.layout.mode == "vram":
        return []
    for name, other in _stored_smaller(plan.spec):
        smaller = make_plan(other, plan.machine, plan.workload)
        if smaller.layout.mode == "vram" and smaller.speed is not None:
            speed = smaller.speed.tokens_s.expected
            return [
                f"stored as {name} ({_gigabytes(other.weights_nbytes)}) all of it lies in "
                f"{'GPU memory' if gpu.unified else 'VRAM'}: {figures(speed)} tok/s"
            ]
    return []


def _holds(layout: Layout) -> bool:
    """Whether memory does, without the disk."""
    return layout.mode not in ("none", "disk")


def _fits(spec: PlanSpec, machine: MachineProfile, work: Workload) -> bool:
    """Whether memory holds it, be it that some sequences wait. Far quicker than a plan with its speed."""
    layouts = [lay_out(spec, machine, work)]
    if machine.gpu is not None and work.concurrency > 1:
        layouts += fewer_at_once(spec, machine, work).values()
    return any(map(_holds, layouts))


def _shorter(plan: Plan) -> list[str]:
    context = plan.workload.context // 2
    while context >= SHORTEST_CONTEXT:
        work = replace(plan.workload, context=context, prompt=min(plan.workload.prompt, context))
        if _fits(plan.spec, plan.machine, work):
            return [f"{plan.spec.name} fits with --context {context}"]
        context //= 2
    return []


def _fewer(plan: Plan) -> list[str]:
    """The largest number of sequences that fits, by halving: memory grows with every one of them."""
    low, high = 0, plan.workload.concurrency
    while high - low > 1:
        middle = (low + high) // 2
        work = replace(plan.workload, concurrency=middle)
        if _holds(lay_out(plan.spec, plan.machine, work)):
            low = middle
        else:
            high = middle
    return [f"{plan.spec.name} fits with --concurrency {low}"] if low else []


def _smaller_formats(plan: Plan) -> list[str]:
    for name, other in _stored_smaller(plan.spec):
        if _fits(other, plan.machine, plan.workload):
            size = _gigabytes(other.weights_nbytes)
            return [f"{plan.spec.name} fits stored as {name} ({size})"]
    return []


def _stored_smaller(spec: PlanSpec) -> Iterator[tuple[str, PlanSpec]]:
    """The model with what is larger stored in each of ``SMALLER``."""
    for name in SMALLER:
        kinds = [k for k in KINDS if k not in ("router", "norm")]
        formats = {k: name for k in kinds if spec.bits(k) > _bits(spec, k, name)}
        if formats:
            yield name, spec.with_formats(formats)


def _bits(spec: PlanSpec, kind: str, name: str) -> float:
    return replace(spec, formats={kind: name}, stored_bits={}).bits(kind)


def _more_memory(plan: Plan) -> list[str]:
    missing = plan.layout.short_nbytes
    if missing <= 0:
        return []
    host = plan.machine.host
    more = replace(host, memory_nbytes=host.memory_nbytes + missing)
    if _fits(plan.spec, replace(plan.machine, host=more), plan.workload):
        return [f"{_gigabytes(missing)} more host memory would hold it"]
    gpu = plan.machine.gpu
    if gpu is not None:
        bigger = replace(gpu, memory_nbytes=gpu.memory_nbytes + missing)
        if _fits(plan.spec, replace(plan.machine, gpu=bigger), plan.workload):
            size = _gigabytes(bigger.memory_nbytes)
            if gpu.unified:
                return [f"a machine with {size} of memory would hold it"]
            return [f"a GPU with {size} of VRAM would hold it"]
    return []


def _gigabytes(nbytes: int) -> str:
    """Rounded up, since what is bought has to be enough: whole gigabytes, tenths of them, megabytes."""
    size = nbytes / 1e9
    if size < 0.1:
        return f"{math.ceil(nbytes / 1e6):,} MB"
    return f"{math.ceil(size):,} GB" if size >= 10 else f"{math.ceil(10 * size) / 10:.1f} GB"


def _other_models(plan: Plan) -> list[str]:
    """The largest bundled model that fits."""
    specs = [bundled_model(name).spec() for name in bundled_names()]
    for spec in sorted(specs, key=lambda s: -s.total_weights):
        if spec.name == plan.spec.name:
            continue
        context = min(plan.workload.context, spec.max_context)
        work = replace(plan.workload, context=context, prompt=min(plan.workload.prompt, context))
        if not _fits(spec, plan.machine, work):
            continue
        other = make_plan(spec, plan.machine, work)
        if _holds(other.layout) and other.speed is not None:
            speed = other.speed.tokens_s.expected
            return [f"the largest bundled model that fits is {spec.name} ({figures(speed)} tok/s)"]
    return []
