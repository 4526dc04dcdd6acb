"""A plan as text: the answer first, then where every byte goes, what binds, and what a change buys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headrace.cli.plan_rates import rates_text
from headrace.cli.sizes import format_size
from headrace.core.words import counted
from headrace.engine.plan import Interval, Plan
from headrace.engine.plan_caution import caution
from headrace.engine.plan_changes import Change
from headrace.experts.simulate import Prediction
from headrace.explain.resources import TITLES
from headrace.explain.step_time import StepTime

LABEL = 12
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
        found += ["", *_labelled("notes", notes)]
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
        *(() if said is None else [f"caution: {said}"]),
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
        *_labelled("machine", [box if machine.name == box else f"{machine.name}: {box}"]),
        *_labelled("rates", rates_text(machine)),
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
    found += _labelled(
        "", [f"{first} s to the first token, after a prompt of {plan.workload.prompt:,}"]
    )
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
                f"prompts in chunks of up to {counted(plan.layout.chunk, 'token', form=',')}; for each of "
                "them the other experts travel",
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
        "disk": f"only with the disk: {short} are missing",
        "cpu": "yes, in host memory, computed by the CPU",
        "none": f"does not fit: {short} are missing",
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
        rows.append(f"no gain: {', '.join(same)}")
    return _labelled("one change", rows)


def _later(plan: Plan, change: Change) -> str:
    """A warning where the first token comes later: other slots, other chunks of prompts."""
    then = change.plan.speed
    if plan.speed is None or then is None:
        return ""
    first = then.ttft_s.expected
    later = first > (1 + NOTABLY_LATER) * plan.speed.ttft_s.expected
    return f", first token after {number(first)} s" if later else ""


def comparison(plans: Sequence[Plan], width: int | None = None) -> list[str]:
    """Plans of one model side by side, one column for each. width: columns of the terminal, None for any
    number; what does not fit beside the others comes below them."""
    rows = [row for row in _compared(plans) if row[0] in ALWAYS or set(row[1]) - {"-"}]
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(plans))]
    found: list[str] = []
    for some in _beside(widths, width):
        found += [""] if found else []
        found += [
            (f"{label:<{LABEL}}" + "  ".join(cells[i].ljust(widths[i]) for i in some)).rstrip()
            for label, cells in rows
        ]
    for machine in {p.machine.name: p.machine for p in plans}.values():
        said = f"rates of {machine.name}: {'; '.join(rates_text(machine))}"
        found += [said] if rates_text(machine) else []
    return found


def _beside(widths: Sequence[int], width: int | None) -> list[range]:
    """Runs of columns that fit the terminal beside their labels, one at least."""
    found: list[range] = []
    first, taken = 0, LABEL
    for i, size in enumerate(widths):
        if width is not None and i > first and taken + size > width:
            found.append(range(first, i))
            first, taken = i, LABEL
        taken += size + 2
    return [*found, range(first, len(widths))]


# Rows of a comparison that are there even if no plan has them.
ALWAYS = ("", "fits", "tok/s", "first token")


def _compared(plans: Sequence[Plan]) -> list[tuple[str, list[str]]]:
    """Labels and cells; "-" where a plan has nothing."""

    def row(label: str, cell: Callable[[Plan], str]) -> tuple[str, list[str]]:
        return label, [cell(plan) for plan in plans]

    def rate(plan: Plan, name: str) -> str:
        return number(getattr(plan.speed.tokens_s, name)) if plan.speed else "-"

    def used(plan: Plan, tier: str) -> str:
        nbytes = plan.layout.total(tier)
        return format_size(nbytes) if nbytes else "-"

    many = any(plan.workload.concurrency > 1 for plan in plans)
    kinds = len({plan.layout.kv_format for plan in plans})
    return [
        row("", lambda p: p.machine.name),
        row("fits", _where),
        row("missing", lambda p: format_size(p.layout.short_nbytes) if p.layout.short else "-"),
        row("at a time", lambda p: f"{p.at_once:,}" if many else "-"),
        row("KV cache", lambda p: p.layout.kv_format if kinds > 1 else "-"),
        row("tok/s", lambda p: rate(p, "expected")),
        row("  at least", lambda p: rate(p, "low")),
        row("  at most", lambda p: rate(p, "high")),
        row("first token", lambda p: f"{number(p.speed.ttft_s.expected)} s" if p.speed else "-"),
        row("hit rate", _hits),
        row("binds", lambda p: resource(p, p.speed.decode.bound) if p.speed else "-"),
        row("VRAM used", lambda p: used(p, "vram")),
        row("RAM used", lambda p: used(p, "ram")),
        row("disk used", lambda p: used(p, "disk")),
    ]


def _where(plan: Plan) -> str:
    """Where a plan's weights are, in two words."""
    gpu = plan.machine.gpu
    shared = gpu is not None and gpu.unified
    return {
        "vram": "in memory" if shared else "in VRAM",
        "ram": "experts in RAM",
        "disk": "needs disk",
        "cpu": "on the CPU",
        "none": "no",
    }[plan.layout.mode]


def _hits(plan: Plan) -> str:
    if plan.speed is None or plan.layout.mode not in ("ram", "disk"):
        return "-"
    return f"{plan.speed.hit_rate.expected:.0%}"
