"""A plan as text: the answer first, then where every byte goes, what binds, and what a change buys."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from headrace.cli.plan_rates import rates_text
from headrace.cli.sizes import format_size
from headrace.core.words import counted
from headrace.engine.plan import Interval, Plan
from headrace.engine.plan_caution import caution
from headrace.engine.plan_changes import Change
from headrace.experts.simulate import Prediction
from headrace.explain.resources import TITLES
from headrace.explain.step_time import StepTime

LABEL, WIDTH = 12, 108
BAR = 56
# One letter for each purpose in a memory bar; what has none is drawn as "#".
LETTERS = {
    "embedding": "e",
    "lm_head": "h",
    "attention": "a",
    "dense": "d",
    "experts": "x",
    "shared": "s",
    "router": "r",
    "norm": "n",
    "KV cache": "K",
    "workspace": "w",
    "reserve": "-",
    "expert slots": "X",
}
# As everywhere, but for what a plan calls by the name of its memory tier, or more shortly.
RESOURCES = {**TITLES, "hbm": "VRAM", "pcie": "link", "launch": "kernel starts"}
TIERS = {"vram": "VRAM", "ram": "host memory", "disk": "disk"}
# Of a machine with one memory for both.
SHARED_TIERS = {"vram": "GPU's part", "ram": "CPU's part", "disk": "disk"}
# What purposes are called where their own names say little.
PURPOSES = {"lm_head": "output head", "dense": "feed-forward", "norm": "norms"}
NO_GAIN = 0.005  # changes of less are named together
NOTABLY_LATER = 0.1  # of the time to the first token, from which a change that costs it says so


def lines(
    plan: Plan,
    changes: Sequence[Change],
    nearest: Sequence[str],
    replayed: Prediction | None = None,
    recorded: int = 0,
) -> list[str]:
    """The whole report. ``recorded``: tokens of the routing that was replayed."""
    found = [*_head(plan), "", *_answer(plan)]
    if replayed is not None:
        found += _labelled("replayed", _replay(replayed, recorded))
    if nearest:
        found += _labelled("faster" if _is_at_home(plan) else "nearest", list(nearest))
    found += ["", *_memory(plan)]
    if changes:
        found += ["", *_changes(plan, changes)]
    notes = [*plan.spec.notes]
    if notes:
        found += ["", *_labelled("notes", [line for text in notes for line in _wrapped(text)])]
    return found


def _replay(found: Prediction, recorded: int) -> list[str]:
    """What the routing of a text makes of the plan."""
    fetched, computed = (
        format_size(n / max(1, found.num_steps)) for n in (found.fetched_nbytes, found.cpu_nbytes)
    )
    idle = ", ".join(f"{name} {found.idle[name]:.0%}" for name in ("gpu", "pcie", "cpu"))
    tokens = counted(found.num_steps, "token", form=",")
    said = caution(recorded)
    return [
        f"{number(found.steps_per_s)} tok/s over {tokens} of the {recorded:,} recorded, "
        f"{found.hit_rate:.0%} of look-ups served",
        *(() if said is None else _wrapped(f"caution: {said}")),
        f"{fetched} a token fetched, {computed} computed by the CPU; idle: {idle}",
    ]


def tiers_of(plan: Plan) -> dict[str, str]:
    """What a machine's memories are called."""
    gpu = plan.machine.gpu
    return SHARED_TIERS if gpu is not None and gpu.unified else TIERS


def _is_at_home(plan: Plan) -> bool:
    """Whether it runs without the disk."""
    return plan.layout.mode not in ("none", "disk")


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    return [f"{label if i == 0 else '':<{LABEL}}{text}" for i, text in enumerate(texts)]


def _wrapped(text: str) -> list[str]:
    """``text`` in lines that a wide terminal takes."""
    return textwrap.wrap(text, WIDTH - LABEL, break_on_hyphens=False, break_long_words=False)


def _head(plan: Plan) -> list[str]:
    spec, machine, work = plan.spec, plan.machine, plan.workload
    parts = [machine.gpu.name] if machine.gpu else []
    parts += [machine.link.name] if machine.link else []
    parts.append(machine.host.cpu)
    box = ", ".join(parts)
    size = f"{_count(spec.total_weights, 4)} weights"
    if spec.sparse:
        size += f", {_count(spec.active_weights, 3)} of them a token"
    tokens = counted(work.context, "token", form=",")
    users = f" x {counted(work.concurrency, 'sequence', form=',')}" if work.concurrency > 1 else ""
    if plan.at_once < work.concurrency:
        users += f", {plan.at_once:,} of them at a time"
    return [
        *_labelled("model", [f"{spec.name}: {size}, {format_size(spec.weights_nbytes)}"]),
        *_labelled("machine", _wrapped(box if machine.name == box else f"{machine.name}: {box}")),
        *_labelled("rates", [line for text in rates_text(machine) for line in _wrapped(text)]),
        *_labelled("for", [f"{tokens}{users}, KV cache in {plan.layout.kv_format}"]),
    ]


def _count(number: int, digits: int) -> str:
    """``116.8 billion``, ``15.01 million``."""
    size, word = (number / 1e9, "billion") if number >= 10**9 else (number / 1e6, "million")
    return f"{size:,.{digits}g} {word}"


def _answer(plan: Plan) -> list[str]:
    found = _labelled("fits", [verdict(plan)])
    speed = plan.speed
    if speed is None:
        return found
    tokens = interval(speed.tokens_s)
    each = ""
    if plan.at_once > 1:
        each = f" together, {number(speed.tokens_s.expected / plan.at_once)} each"
    found += _labelled("speed", [f"{tokens} tok/s{each}"])
    first = interval(speed.ttft_s)
    found += _labelled("", [f"{first} s to the first token of {plan.workload.prompt:,}"])
    if plan.layout.mode in ("ram", "disk"):
        hits = speed.hit_rate
        found += _labelled(
            "experts",
            [
                f"{plan.layout.slots:,} of {plan.spec.moe_layers * plan.spec.num_experts:,} in "
                f"{'VRAM' if tiers_of(plan) is TIERS else 'the ' + tiers_of(plan)['vram']} "
                f"({plan.layout.resident:.1%}) serve {hits.expected:.0%} of look-ups "
                f"({hits.low:.0%} to {hits.high:.0%})",
                f"misses: {speed.fetch_share:.0%} fetched, {1 - speed.fetch_share:.0%} computed by the CPU",
                f"prompts in chunks of up to {counted(plan.layout.chunk, 'token', form=',')}; the others "
                "travel for each",
            ],
        )
    found += _labelled(
        "binds",
        [f"decoding: {binding(plan, speed.decode)}", f"prompt: {binding(plan, speed.prefill)}"],
    )
    return found


def verdict(plan: Plan) -> str:
    """Whether it fits, in one sentence."""
    gpu = plan.machine.gpu
    shared = gpu is not None and gpu.unified
    parts = [
        f"{format_size(n)} of {'memory' if shared and tier != 'disk' else TIERS[tier]}"
        for tier, n in plan.layout.short.items()
    ]
    short = " and ".join(parts)
    return {
        "vram": "yes, in the GPU's part of the memory" if shared else "yes, all of it in VRAM",
        "ram": "yes, with some experts in the CPU's part of the memory"
        if shared
        else "yes, with the experts in host memory",
        "disk": f"only with the disk: short of {short}",
        "cpu": "yes, in host memory, computed by the CPU",
        "none": f"does not fit: short of {short}",
    }[plan.layout.mode]


def interval(value: Interval) -> str:
    return f"{number(value.expected)} ({number(value.low)} to {number(value.high)})"


def number(value: float) -> str:
    """Three significant digits, never in exponents."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def resource(plan: Plan, name: str) -> str:
    """What a resource is called on the plan's machine."""
    gpu = plan.machine.gpu
    if gpu is not None and gpu.unified and name in ("hbm", "dram"):
        return "memory"
    return RESOURCES.get(name, name)


def binding(plan: Plan, step: StepTime) -> str:
    """Resources by their share of a step, largest first; under 3% is left out."""
    parts = [
        f"{resource(plan, name)} {seconds / step.seconds:.0%}"
        for name, seconds in step.by_resource().items()
        if seconds >= 0.03 * step.seconds
    ]
    return ", ".join(parts)


def _memory(plan: Plan) -> list[str]:
    found: list[str] = []
    for tier, uses in plan.layout.used.items():
        total, capacity = plan.layout.total(tier), plan.layout.capacity.get(tier)
        of = f" of {format_size(capacity)}" if capacity else ""
        found += _labelled(tiers_of(plan)[tier], [f"{format_size(total)}{of}"])
        found += _labelled("", [bar(uses, max(total, capacity or total))])
        for name, nbytes in sorted(uses.items(), key=lambda item: -item[1]):
            found += _labelled("", [_use(name, nbytes)])
    return found


def _use(name: str, nbytes: int) -> str:
    return f"{LETTERS.get(name, '#')} {PURPOSES.get(name, name):<14}{format_size(nbytes):>9}"


def bar(uses: dict[str, int], capacity: int) -> str:
    """One line of letters in proportion; ``.`` is free."""
    drawn, done = "", 0
    for name, nbytes in sorted(uses.items(), key=lambda item: -item[1]):
        done += nbytes
        width = round(BAR * done / max(1, capacity)) - len(drawn)
        drawn += LETTERS.get(name, "#") * max(0, width)
    return f"[{drawn[:BAR]:.<{BAR}}]"


def _changes(plan: Plan, changes: Sequence[Change]) -> list[str]:
    rows: list[str] = []
    same: list[str] = []
    for change in changes:
        speed = change.plan.speed
        assert speed is not None
        if change.factor is not None and abs(change.factor - 1) < NO_GAIN:
            same.append(change.name)
            continue
        tokens = f"{number(speed.tokens_s.expected):>8} tok/s"
        gain = f"  {change.factor - 1:+.0%}" if change.factor is not None else "  it would fit"
        rows.append(f"{change.name:<28}{tokens}{gain}{_later(plan, change)}")
    if same:
        rows += _wrapped(f"no gain: {', '.join(same)}")
    return _labelled("one change", rows)


def _later(plan: Plan, change: Change) -> str:
    """A warning where the first token comes later: other slots, other chunks of prompts."""
    then = change.plan.speed
    if plan.speed is None or then is None:
        return ""
    first = then.ttft_s.expected
    later = first > (1 + NOTABLY_LATER) * plan.speed.ttft_s.expected
    return f", first token after {number(first)} s" if later else ""


def comparison(plans: Sequence[Plan]) -> list[str]:
    """Plans of one model side by side, one column for each."""
    rows: list[tuple[str, list[str]]] = [("", [p.machine.name for p in plans])]
    short = {
        "vram": "in VRAM",
        "ram": "experts in RAM",
        "disk": "needs disk",
        "cpu": "on the CPU",
        "none": "no",
    }
    rows.append(("fits", [short[p.layout.mode] for p in plans]))
    rows.append(
        (
            "short of",
            [format_size(p.layout.short_nbytes) if p.layout.short_nbytes else "-" for p in plans],
        )
    )
    if any(p.workload.concurrency > 1 for p in plans):
        rows.append(("at a time", [f"{p.at_once:,}" for p in plans]))
    rows.append(("tok/s", [number(p.speed.tokens_s.expected) if p.speed else "-" for p in plans]))
    rows.append(("  at least", [number(p.speed.tokens_s.low) if p.speed else "-" for p in plans]))
    rows.append(("  at most", [number(p.speed.tokens_s.high) if p.speed else "-" for p in plans]))
    rows.append(
        ("first token", [f"{number(p.speed.ttft_s.expected)} s" if p.speed else "-" for p in plans])
    )
    rows.append(("hit rate", [_hits(p) for p in plans]))
    rows.append(("binds", [resource(p, p.speed.decode.bound) if p.speed else "-" for p in plans]))
    for tier, label in (("vram", "VRAM used"), ("ram", "RAM used"), ("disk", "disk used")):
        rows.append((label, [format_size(p.layout.total(tier)) for p in plans]))
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(plans))]
    found = [
        (f"{label:<{LABEL}}" + "  ".join(c.ljust(w) for c, w in zip(cells, widths))).rstrip()
        for label, cells in rows
    ]
    for machine in {p.machine.name: p.machine for p in plans}.values():
        said = f"rates of {machine.name}: {'; '.join(rates_text(machine))}"
        found += _wrapped(said) if rates_text(machine) else []
    return found


def _hits(plan: Plan) -> str:
    if plan.speed is None or plan.layout.mode not in ("ram", "disk"):
        return "-"
    return f"{plan.speed.hit_rate.expected:.0%}"
