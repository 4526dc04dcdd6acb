"""Where the rates behind a plan come from, in words: measured, looked at once, published or estimated."""

from __future__ import annotations

from headrace.explain.units_text import amount
from headrace.machine.disturbance import disturbance_text
from headrace.machine.profile import MachineProfile, Rate

THIS = "this"  # the name of a machine that was looked at and not measured
# What plans are made from, in the words of their reports; the rest are small parts of a step.
_NAMES = {
    "hbm_read": "GPU memory",
    "gpu_flops_bf16": "GPU products",
    "pcie_h2d": "link",
    "dram_read": "host memory",
    "cpu_flops_f32": "CPU products",
}
MAIN_RATES = tuple(_NAMES)
_HOW = "`headrace bench machine` measures this machine in a minute, and plans take its rates from then on"


def rates_text(machine: MachineProfile) -> list[str]:
    """Sentences for a plan: none for a machine whose main rates are all published."""
    # The CPU's arithmetic decides little beside a GPU, which computes prompts.
    names = _NAMES.keys() - {"cpu_flops_f32"} if machine.gpu else {"dram_read", "cpu_flops_f32"}
    if machine.gpu is not None and machine.gpu.unified:
        names -= {"pcie_h2d"}  # nothing is copied
    rates = {n: machine.rates[n] for n in _NAMES if n in machine.rates and n in names}
    looked = {n: rate for n, rate in rates.items() if rate.source.startswith("measured")}
    guessed = {n: rate for n, rate in rates.items() if rate.source.startswith("estimate")}
    if machine.measured_at:
        said = f"measured {machine.measured_at[:10]} by `headrace bench machine`"
        others = {n: rate for n, rate in rates.items() if n not in looked}
        disturbance = disturbance_text(machine.disturbed)
        return [
            f"{said}, but for {_listed(others)}" if others else said,
            *([] if disturbance is None else [f"disturbed: {disturbance}"]),
        ]
    if machine.name != THIS:
        return [f"estimated, since nothing is published: {_listed(guessed)}"] if guessed else []
    said = [f"rough: {_listed(looked)} by a quick read just now"]
    if guessed:
        said.append(f"assumed: {_listed(guessed)}")
    sheet = {n: rate for n, rate in rates.items() if n not in looked and n not in guessed}
    if sheet:
        said.append(f"data sheet's: {_listed(sheet)}")
    return [*said, _HOW]


def _listed(rates: dict[str, Rate]) -> str:
    parts: list[str] = []
    for name, rate in rates.items():
        why = rate.source.removeprefix("estimate: ") if rate.source.startswith("estimate") else ""
        unit = {"GB/s": "B/s", "GFLOP/s": "FLOP/s"}[rate.unit]
        shown = f"{_NAMES[name]} {amount(rate.value * 1e9, unit)}"
        parts.append(f"{shown} ({why})" if why else shown)
    return ", ".join(parts)
