"""A machine profile for people: a table of rates, and bandwidth against threads as a picture."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.core.words import counted
from headrace.machine.disturbance import disturbance_text
from headrace.machine.profile import OVERLAPPED, MachineProfile, Rate

# The table's order and words. Curves (names that end in _t<n>) are the picture's.
_LABELS = (
    ("dram_read", "DRAM, read"),
    ("cpu_experts_", "CPU experts, "),
    ("cpu_flops_", "CPU products, "),
    ("pcie_h2d", "PCIe, host to GPU"),
    ("pcie_d2h", "PCIe, GPU to host"),
    ("pcie_gather", "PCIe, gather by a kernel"),
    ("hbm_read", "GPU memory, read"),
    ("gpu_flops_", "GPU products, "),
    ("kernel_launch", "kernel launch"),
    ("graph_launch", "graph launch"),
    ("graph_kernel", "kernel in a graph"),
    ("graph_read", "kernel in a graph that reads"),
    ("flag_round_trip", "flag to the CPU and back"),
    ("", ""),  # whatever else was measured, by its own name
)
_CURVE = re.compile(r"(dram_read|cpu_experts_[a-z0-9_]+?)_t([0-9]+)(_overlapped)?")
_PLOT_COLUMNS = 48


def format_rate(rate: Rate | None) -> str:
    """A rate with its unit; empty for none."""
    if rate is None:
        return ""
    if rate.unit == "s":
        return f"{rate.value * 1e6:.2f} us"
    if rate.unit == "GFLOP/s":
        return (
            f"{rate.value / 1e3:.1f} TFLOP/s" if rate.value >= 1e3 else f"{rate.value:.0f} GFLOP/s"
        )
    return f"{rate.value:.1f} GB/s"


def rows(profile: MachineProfile, peaks: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """The table: label, alone, overlapped, percent of the theoretical peak where that is known."""
    found: list[tuple[str, str, str, str]] = []
    names = [n for n in profile.rates if not _CURVE.fullmatch(n) and not n.endswith(OVERLAPPED)]
    shown: set[str] = set()
    for prefix, label in _LABELS:
        for name in names:
            exact = bool(prefix) and not prefix.endswith("_")
            if name in shown or (name != prefix if exact else not name.startswith(prefix)):
                continue
            shown.add(name)
            rate = profile.rates[name]
            peak = peaks.get(name)
            found.append(
                (
                    label + ("" if exact else _words(name.removeprefix(prefix))),
                    format_rate(rate),
                    format_rate(profile.rates.get(name + OVERLAPPED)),
                    "" if not peak else f"{rate.value / peak:.0%} of {_peak(peak, rate)}",
                )
            )
    return found


def _words(rest: str) -> str:
    """What is behind a rate's prefix, for people."""
    return rest.removesuffix("_of16") + ", 16 tokens each" if rest.endswith("_of16") else rest


def _peak(value: float, rate: Rate) -> str:
    return format_rate(Rate(value, rate.unit, rate.mode, rate.source))


def curves(profile: MachineProfile) -> dict[str, dict[int, tuple[float, float | None]]]:
    """Bandwidth by threads: name of the rate -> threads -> GB/s alone and overlapped."""
    found: dict[str, dict[int, tuple[float, float | None]]] = {}
    for name, rate in profile.rates.items():
        match = _CURVE.fullmatch(name)
        if match is not None and not match[3]:
            beside = profile.gbps(name + OVERLAPPED)
            found.setdefault(match[1], {})[int(match[2])] = (rate.value, beside)
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def print_table(profile: MachineProfile, peaks: Mapping[str, float]) -> None:
    """The table, to standard output."""
    from rich.console import Console
    from rich.table import Table

    gpu = "no GPU" if profile.gpu is None else profile.gpu.name
    link = "" if profile.link is None else f", {profile.link.name}"
    table = Table(title=f"{gpu}{link}; {profile.host.cpu}, {counted(profile.host.cores, 'core')}")
    found = rows(profile, peaks)
    heads = ("rate", "alone", "beside the other path", "of the theoretical peak")
    # Without a GPU there is no other path, and no peak is known.
    shown = [i for i in range(len(heads)) if i < 2 or any(row[i] for row in found)]
    for i in shown:
        table.add_column(heads[i], justify="right" if i else "left")
    for row in found:
        table.add_row(*(row[i] for i in shown))
    console = Console()
    console.print(table)
    if profile.best_threads is not None:
        beside = " beside the GPU" if profile.gpu is not None else ""
        console.print(
            f"best number of CPU threads{beside}: {profile.best_threads}", highlight=False
        )
    disturbance = disturbance_text(profile.disturbed)
    if disturbance is not None:
        console.print(f"disturbed: {disturbance}", highlight=False)


def lines_of_plot(profile: MachineProfile, *, color: bool = False) -> Iterator[str]:
    """Bandwidth against threads as text: one pair of bars for each count."""
    found = curves(profile)
    top = max((max(a, b or 0.0) for c in found.values() for a, b in c.values()), default=0.0)
    for name, points in found.items():
        yield ""
        both = any(beside is not None for _, beside in points.values())
        marks = " (# alone, = beside a PCIe gather)" if both else ""
        yield f"{_title(name)}, GB/s by threads{marks}"
        for threads, (alone, beside) in points.items():
            mark = " <- best" if threads == profile.best_threads else ""
            yield f"{threads:>4} {_bar(alone, top, '#', color)} {alone:.1f}{mark}"
            if beside is not None:
                yield f"     {_bar(beside, top, '=', color)} {beside:.1f}"


def _title(name: str) -> str:
    if name == "dram_read":
        return "plain read loop"
    return f"experts in {name.removeprefix('cpu_experts_')}"


def _bar(value: float, top: float, mark: str, color: bool) -> str:
    bar = mark * max(1, round(value / top * _PLOT_COLUMNS))
    if not color:
        return bar
    return f"\x1b[{36 if mark == '#' else 33}m{bar}\x1b[0m"


def draw_png(profile: MachineProfile, path: Path) -> None:
    """The same picture as a file."""
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    module: Any = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(7, 4.5), dpi=150)
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves(profile).items():
        threads = list(points)
        (line,) = axes.plot(threads, [a for a, _ in points.values()], "o-", label=_title(name))
        beside = [b for _, b in points.values()]
        if None not in beside:
            axes.plot(
                threads,
                beside,
                "s--",
                color=line.get_color(),
                label=f"{_title(name)}, beside a PCIe gather",
            )
    if profile.best_threads is not None:
        axes.axvline(profile.best_threads, color="gray", linewidth=0.8, label="best count")
    axes.set(xlabel="threads", ylabel="GB/s", title=profile.name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
