"""The catalogue as static pages: an index to search, a page for each class, one for the machines.

Nothing is fetched from elsewhere; the pages work from a folder and without a network.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable
from pathlib import Path

from headrace.core.errors import InternalError, MachineError
from headrace.explain.catalogue.derivation import (
    CORRECTS,
    machine_title,
    output_lines,
    used_symbols,
    work_lines,
)
from headrace.explain.catalogue.evaluate import (
    Setting,
    price_of,
    run_checks,
    setting,
    work_of,
)
from headrace.explain.catalogue.record import Catalogue, Record
from headrace.explain.catalogue.roofline import Point, roofline_svg, roofs
from headrace.explain.resources import TITLES
from headrace.explain.units_text import amount, figures
from headrace.machine.known import known_machine
from headrace.machine.known import parts as parts_by_name
from headrace.machine.profile import MachineProfile

# Models that the machines' pictures show each class with.
PICTURED = ("dense_decode", "dense_prefill")
MOST_LEANED_ON = 12

STYLE = """
:root{color-scheme:light dark;--line:#8884;--accent:#0a6ebd;--warn:#b35900}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
a{color:var(--accent)}code,pre{font:14px/1.45 ui-monospace,monospace}
pre{overflow-x:auto;border:1px solid var(--line);border-radius:6px;padding:.75rem}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.3rem .5rem;border-bottom:1px solid var(--line);vertical-align:top}
td.number{text-align:right}input,select{font:inherit;padding:.4rem}input{width:22rem;max-width:100%}
.tag{border:1px solid var(--line);border-radius:4px;padding:0 .4rem;font-size:.85em;white-space:nowrap}
.wrong{border-left:4px solid var(--warn);padding-left:.75rem}nav{margin-bottom:1rem}
svg{width:100%;height:auto;border:1px solid var(--line);border-radius:6px}
svg text{font:12px system-ui,sans-serif;fill:currentColor}svg .grid{stroke:var(--line);fill:none}
svg .roof{stroke:currentColor;stroke-width:2;fill:none}svg circle{fill:var(--accent);fill-opacity:.75}
svg .edge{fill:none;stroke:var(--accent)}
"""

SCRIPT = """
const rows=[...document.querySelectorAll('tbody tr')],box=document.getElementById('words');
const picks=[...document.querySelectorAll('select')],count=document.getElementById('count');
function show(){
  const words=box.value.toLowerCase().split(/\\s+/).filter(Boolean);let shown=0;
  for(const row of rows){
    const entry=ENTRIES[row.dataset.id];
    const ok=words.every(w=>entry.text.includes(w))&&picks.every(p=>!p.value||entry[p.name]===p.value);
    row.hidden=!ok;shown+=ok;
  }
  count.textContent=shown+' of '+rows.length;
}
box.addEventListener('input',show);picks.forEach(p=>p.addEventListener('change',show));show();
"""


GENERATOR = '<meta name="generator" content="headrace flops site">'


def is_ours(folder: Path) -> bool:
    """Whether the pages may go there: there is no index, or one that was written here."""
    index = folder / "index.html"
    return not index.exists() or (
        index.is_file() and GENERATOR in index.read_text(encoding="utf-8", errors="replace")
    )


def write_site(catalogue: Catalogue, folder: Path) -> int:
    """Write every page below ``folder`` and return their number. Files of the same names are replaced."""
    pages = {
        "index.html": index_page(catalogue),
        "machines.html": machines_page(catalogue),
        **{f"class/{r.id}.html": class_page(r, catalogue) for r in catalogue.records.values()},
    }
    (folder / "class").mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(pages)


def page(title: str, body: str, up: str = "", script: str = "") -> str:
    """A whole page. ``up``: the way to the index."""
    end = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{GENERATOR}"
        f'<style>{STYLE}</style></head><body><nav><a href="{up}index.html">FLOP classes</a> &middot; '
        f'<a href="{up}machines.html">Machines</a></nav><h1>{html.escape(title)}</h1>{body}{end}'
        "</body></html>\n"
    )


def _link(ident: str, up: str = "") -> str:
    return f'<a href="{up}class/{ident}.html">{html.escape(ident)}</a>'


def _bound(record: Record, catalogue: Catalogue) -> str:
    return price_of(record, setting(catalogue.symbols, record.profile)).bound if record.work else ""


def index_page(catalogue: Catalogue) -> str:
    """All classes with a search box, choices of bound, status and category, and the most leaned on."""
    entries: dict[str, dict[str, str]] = {}
    rows: list[str] = []
    users = catalogue.leaned_on()
    for record in catalogue.records.values():
        bound = _bound(record, catalogue)
        text = f"{record.id} {record.title} {record.about} {record.category}".lower()
        entries[record.id] = {
            "text": text,
            "bound": bound,
            "status": record.status,
            "category": record.category,
        }
        rows.append(
            f'<tr data-id="{record.id}"><td>{_link(record.id)}<br>{html.escape(record.title)}</td>'
            f"<td>{html.escape(TITLES.get(bound, record.kind))}</td><td>{record.status}</td>"
            f'<td class="number">{len(users[record.id])}</td></tr>'
        )
    picks = "".join(
        f'<select name="{name}" aria-label="{name}"><option value="">any {name}</option>'
        + "".join(
            f'<option value="{value}">{html.escape(TITLES.get(value, value))}</option>'
            for value in sorted({entry[name] for entry in entries.values()} - {""})
        )
        + "</select> "
        for name in ("bound", "status", "category")
    )
    checks = run_checks(catalogue)
    top = "".join(
        f"<li>{_link(name)}: {len(ids)}</li>" for name, ids in list(users.items())[:MOST_LEANED_ON]
    )
    body = (
        f"<p>{len(rows)} classes of work that language models are made of, each as formulas of what it "
        "asks of every resource. What binds is worked out from them for a model and a machine; the "
        f"column shows each class with its own example. {len(checks)} checks, "
        f"{sum(not c.holds for c in checks)} of them failing.</p>"
        f'<p><input id="words" type="search" placeholder="words" aria-label="words"> {picks}'
        '<span id="count"></span></p>'
        "<table><thead><tr><th>class</th><th>bound</th><th>status</th><th>leaned on by</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table><h2>Leaned on most</h2><ol>{top}</ol>"
    )
    data = json.dumps(entries).replace("</", "<\\/")
    return page("FLOP classes", body, script=f"const ENTRIES={data};{SCRIPT}")


def class_page(record: Record, catalogue: Catalogue) -> str:
    """One class: derivation, symbols, checks, links both ways, sources."""
    at = setting(catalogue.symbols, record.profile)
    tags = (record.category, record.status, f"confidence {record.confidence:.2f}", record.id)
    parts = ["<p>" + " ".join(f'<span class="tag">{html.escape(t)}</span>' for t in tags) + "</p>"]
    parts.append(f"<p>{html.escape(record.about)}</p>")
    if record.ignores:
        parts.append(f"<p>Leaves out: {html.escape(record.ignores)}.</p>")
    if record.correction:
        parts.append(f'<p class="wrong">{CORRECTS}: {html.escape(record.correction)}</p>')
    if record.work:
        parts.append(
            f"<h2>Work</h2><p>{html.escape(at.about)}; on {html.escape(machine_title(at))}</p>"
        )
        parts.append(_pre(work_lines(record, at)))
    if record.outputs:
        parts.append("<h2>What follows</h2>")
        parts.append(_pre(output_lines(record, at)))
    if record.rule:
        parts.append(f"<h2>Rule: {html.escape(record.rule.output)}</h2>")
        cases = (f"{_given(i)}: {o}" for i, o in record.rule.cases)
        parts.append(_pre([record.rule.expr, "", *cases]))
    parts.append(_symbols(record, catalogue, at))
    if record.checks:
        parts.append(
            _table(
                ("formula", "is", "because"),
                ((c.expr, str(c.want), c.source) for c in record.checks),
            )
        )
    for title, ids in (
        ("Leans on", record.leans_on),
        ("Leaned on by", catalogue.leaned_on()[record.id]),
    ):
        if ids:
            links = "".join(f"<li>{_link(name, '../')}</li>" for name in ids)
            parts.append(f"<h2>{title}</h2><ul>{links}</ul>")
    sources = "".join(f"<li>{html.escape(s)}</li>" for s in record.sources)
    parts.append(f"<h2>Sources</h2><ul>{sources}</ul>")
    return page(record.title, "".join(parts), up="../")


def _given(inputs: object) -> str:
    return ", ".join(f"{k} = {v}" for k, v in dict(inputs).items())  # type: ignore[call-overload]


def _pre(lines: Iterable[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    titles = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table>"


def _symbols(record: Record, catalogue: Catalogue, at: Setting) -> str:
    names = used_symbols(record.formulas.values(), catalogue.symbols)
    rows: list[tuple[str, ...]] = []
    for name in names:
        symbol = catalogue.symbols.by_name[name]
        if symbol.group != "unit":
            meaning = symbol.formula or symbol.about
            rows.append((name, figures(at.values[name], 4), symbol.unit_text, meaning))
    return "<h2>Symbols</h2>" + _table(("symbol", "value", "unit", "meaning"), rows) if rows else ""


def machines_page(catalogue: Catalogue) -> str:
    """A roofline for each machine, with the classes of two models on it, and its rates with sources."""
    parts: list[str] = []
    for machine in catalogue.symbols.machines.values():
        peak, memory = roofs(machine)
        parts.append(f"<h2>{html.escape(machine.name)}, of the classes' examples</h2>")
        for profile in PICTURED:
            at = setting(catalogue.symbols, profile, machine=machine)
            parts.append(
                f"<p>{html.escape(at.about)}; {amount(peak, 'FLOP/s')}, {amount(memory, 'B/s')}</p>"
            )
            parts.append(roofline_svg(machine, points(catalogue, at)))
        parts.append(_rates(machine))
    for machine in catalogued_machines():
        peak, memory = roofs(machine)
        at = setting(catalogue.symbols, PICTURED[0], machine=machine)
        parts.append(f"<h2>{html.escape(machine.name)}</h2>")
        parts.append(
            f"<p>{html.escape(machine_title(at))}; {html.escape(at.about)}; {amount(peak, 'FLOP/s')}, "
            f"{amount(memory, 'B/s')}</p>"
        )
        parts.append(roofline_svg(machine, points(catalogue, at)))
        parts.append(_rates(machine))
    return page("Machines", "".join(parts))


def catalogued_machines() -> list[MachineProfile]:
    """Every chip of the catalogue of machines, with the link and the host that its record names."""
    found: list[MachineProfile] = []
    for name, part in parts_by_name().items():
        machine = known_machine(name) if part.kind == "gpu" else None
        if machine is not None and {"gpu_flops_bf16", "hbm_read"} <= set(machine.rates):
            found.append(machine)
    return found


def _rates(machine: MachineProfile) -> str:
    rows = ((n, f"{r.value:g} {r.unit}", r.source) for n, r in machine.rates.items())
    return _table(("rate", "value", "source"), rows)


def points(catalogue: Catalogue, at: Setting) -> list[Point]:
    """Every class that computes, at its floor on this machine."""
    found: list[Point] = []
    for record in catalogue.records.values():
        try:
            priced, work = price_of(record, at), work_of(record, at.values)
        except (MachineError, InternalError):
            continue
        if work.flops and priced.floor_s and math.isfinite(priced.intensity):
            link = f"class/{record.id}.html"
            found.append(Point(record.id, priced.intensity, work.flops / priced.floor_s, link))
    return found
