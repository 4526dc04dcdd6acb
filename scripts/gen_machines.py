"""docs/reference/machines.md: the catalogue of machines, engines' efficiencies, bundled models."""

from __future__ import annotations

from pathlib import Path

from headrace.core.config_library import bundled_model, bundled_names
from headrace.explain.engine_model import engine_models
from headrace.machine.known import Part, parts

PAGE = Path("docs/reference/machines.md")
HEAD = """\
# Machines, engines and models that a plan knows

<!-- Written by scripts/gen_machines.py from src/headrace/machine/catalogue, src/headrace/explain/engines.toml
and src/headrace/configs: edit those, then run `make docs`. -->

Rates are published peaks, dense and one way. A source that begins with "unverified" is quoted from a data
sheet from memory, one with "estimate" is ours. `headrace plan --machine NAME`; parts join with `+`.
"""
UNITS = {"hbm_read": "GB/s", "link": "GB/s", "pcie_h2d": "GB/s", "dram_read": "GB/s"}
TITLES = {"gpu": "Chips", "link": "Links", "host": "Hosts"}


def number(value: float) -> str:
    return f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"


def part_rows(part: Part) -> list[str]:
    memory = f"{part.memory_nbytes / 1e9:,.4g} GB" if part.memory_nbytes else ""
    rows: list[str] = []
    for i, (name, (value, source)) in enumerate(part.rates.items()):
        first = [f"`{part.name}`", part.title, memory] if i == 0 else ["", "", ""]
        unit = UNITS.get(name, "TFLOP/s")
        rows.append("| " + " | ".join([*first, name, f"{number(value)} {unit}", source]) + " |")
    if part.specs:
        units = {"gpu": ("sms", "units"), "host": ("cores", "cores")}[part.kind]
        size = f"{memory}, {part.raw[units[0]]:,} {units[1]}"
        rows.append("| " + " | ".join(["", "", "", "memory", size, part.specs]) + " |")
    return rows


def machines() -> list[str]:
    lines: list[str] = []
    for kind, title in TITLES.items():
        lines += [f"## {title}", "", "| name | what | memory | rate | value | source |"]
        lines.append("| --- | --- | --- | --- | --- | --- |")
        for part in parts().values():
            if part.kind == kind:
                lines += part_rows(part)
        lines.append("")
    return lines


def engines() -> list[str]:
    lines = [
        "## Engines",
        "",
        "Shares of a machine's rates, one set for an engine. `reach` applies to published peaks only.",
        "",
        "| engine | share of | value | source |",
        "| --- | --- | --- | --- |",
    ]
    for engine in engine_models().values():
        tables = {"reach": engine.reach, "kernel": engine.kernel, "prompts": engine.prompts}
        for path, source in engine.sources.items():
            group, _, resource = path.rpartition(".")
            table = tables.get(group)
            shares = table if table is not None else engine.attention[group.split(".")[1]]
            lines.append(f"| {engine.title} | {path} | {shares[resource]:g} | {source} |")
    return [*lines, ""]


def models() -> list[str]:
    lines = [
        "## Bundled models",
        "",
        "| name | weights | a token | as stored | published | source | not verified |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in bundled_names():
        model = bundled_model(name)
        spec = model.spec()
        cells = [
            f"`{name}`",
            f"{spec.total_weights / 1e9:,.4g} billion",
            f"{spec.active_weights / 1e9:,.3g} billion",
            f"{spec.file_nbytes / 1e9:,.4g} GB",
            f"{model.published['parameters'] / 1e9:,.4g} billion ({model.published['source']})",
            model.source,
            "; ".join(model.unverified) or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def pages() -> dict[Path, str]:
    return {PAGE: "\n".join([HEAD, *machines(), *engines(), *models()]) + "\n"}
