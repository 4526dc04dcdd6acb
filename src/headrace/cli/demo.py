"""``headrace demo``: the embedded mixture writes, its own routing says what a cache would hit, and
where a step's time goes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.cli import columns
from headrace.cli.exit_codes import EXIT_INTERRUPTED
from headrace.cli.flags import Commands, add_command, whole_number
from headrace.cli.progress import loading_progress
from headrace.cli.reporting import configure_logging
from headrace.cli.routing_log import RoutingLog, experts_of
from headrace.cli.session import Interrupts, Session, open_session
from headrace.core.config import EngineConfig
from headrace.core.errors import InternalError
from headrace.core.request import SamplingParams
from headrace.core.words import counted
from headrace.engine.plan_caution import caution
from headrace.experts.replay import (
    best_static_set,
    replay_belady,
    replay_lru,
    replay_static,
    slots_for,
    visits_of,
)

if TYPE_CHECKING:
    from headrace.explain.report import ExplainReport

MODEL = "tiny"
# In the style of each part of its corpus: speeches, code, manuals.
PROMPTS = (
    "The American people",
    "class Reader:\n    def __init__(self, path):",
    "The following example shows how to",
)
TOKENS = 96
SEED = 1
EXPLAIN_PROMPT, EXPLAIN_STEPS = 64, 32
RESIDENCIES = (0.15, 0.25, 0.50)
# Enough freedom not to run in circles, as greedy small models do.
TEMPERATURE, TOP_P = 0.7, 0.9


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "demo",
        "run the embedded mixture: its text, what an expert cache would hit, and where time goes",
        run,
    )
    parser.add_argument(
        "--max-tokens",
        type=whole_number("--max-tokens", 1, 900),
        default=TOKENS,
        metavar="N",
        help=f"tokens to write for each prompt (default: {TOKENS})",
    )
    parser.add_argument(
        "--seed",
        type=whole_number("--seed", 0, 2**63 - 1),
        default=SEED,
        metavar="N",
        help=f"the same seed gives the same text (default: {SEED})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was chosen")


@dataclass(frozen=True)
class CacheRow:
    """Hit rates with one share of the experts resident."""

    residency: float
    slots: int
    lru: float
    static: float
    belady: float


def cache_rows(ids: list[list[list[int]]], num_experts: int) -> list[CacheRow]:
    """Replay the routing against caches of three sizes."""
    visits = visits_of(ids, num_experts)
    rows: list[CacheRow] = []
    for residency in RESIDENCIES:
        slots = slots_for(residency, len(ids), num_experts)
        static = replay_static(visits, best_static_set(visits, slots))
        rows.append(
            CacheRow(
                residency,
                slots,
                replay_lru(visits, slots).hit_rate,
                static.hit_rate,
                replay_belady(visits, slots).hit_rate,
            )
        )
    return rows


def table(rows: list[CacheRow], tokens: int, layers: int, experts: int) -> list[str]:
    """The rows as text, with what was replayed above and what it means below."""
    lines = [
        f"{counted(tokens, 'token')} through {counted(layers, 'layer')} of "
        f"{counted(experts, 'expert')}. Had only a part of the experts been in fast memory:",
        "",
        "RESIDENT        LRU   BEST STATIC SET   BELADY",
    ]
    for row in rows:
        lines.append(
            f"{row.residency:>4.0%} ({row.slots:>3})  {row.lru:>6.1%}   {row.static:>15.1%}   "
            f"{row.belady:>6.1%}"
        )
    few = caution(tokens)
    return [
        *lines,
        *(() if few is None else ("", few[0].upper() + few[1:] + ".")),
        "",
        "Shares of look-ups served, from an empty cache. LRU drops the least recently used expert; "
        "the static set is the best in hindsight; Belady knows the future, and nobody has more.",
    ]


def write(
    session: Session, args: argparse.Namespace, show: Callable[[str], None], asked: Interrupts
) -> list[str]:
    """Continue every prompt; the texts."""
    sampling = SamplingParams(
        temperature=TEMPERATURE, top_p=TOP_P, seed=args.seed, max_tokens=args.max_tokens
    )
    texts: list[str] = []
    for prompt in PROMPTS:
        show(prompt)
        parts: list[str] = []
        for delta in session.generate(session.text.encode(prompt), sampling, asked):
            parts.append(delta.text)
            show(delta.text)
        show("\n\n" + "-" * 72 + "\n")
        texts.append("".join(parts))
        if asked.asked:
            break
    return texts


def run(args: argparse.Namespace) -> int:
    configure_logging(args.verbose)
    with loading_progress() as progress:
        session = open_session(EngineConfig(MODEL), progress)
    log = RoutingLog()
    session.engine.watch_routing(log)

    def show(text: str) -> None:
        if not args.json:
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        with Interrupts().caught() as asked:
            texts = write(session, args, show, asked)
        if asked.asked:
            return EXIT_INTERRUPTED
        session.engine.watch_routing(None)
        report = explain_decode(session)
    finally:
        session.close()
    ids, experts = log.ids(), experts_of(MODEL)
    rows = cache_rows(ids, experts)
    if args.json:
        made = [{"prompt": p, "text": t} for p, t in zip(PROMPTS, texts, strict=True)]
        answer = {
            "model": MODEL,
            "texts": made,
            "tokens": len(ids[0]),
            "layers": len(ids),
            "experts": experts,
            "caution": caution(len(ids[0])),
            "caches": [dataclasses.asdict(row) for row in rows],
            "explain": report.to_data(),
        }
        print(json.dumps(answer, ensure_ascii=False))
    else:
        from headrace.explain import report_text

        columns.show(table(rows, len(ids[0]), len(ids), experts))
        print("\nWhere a step's time goes (`headrace explain MODEL` says more):\n")
        columns.show(report_text.table(report, columns.terminal_width()))
    return 0


def explain_decode(session: Session) -> ExplainReport:
    """A few more steps of the same engine, watched."""
    from headrace.engine.explaining import Workload, report_of, run_steps
    from headrace.engine.this_machine import this_machine
    from headrace.machine.probe import probe_machine

    engine = session.engine
    watch = run_steps(engine, Workload("decode", EXPLAIN_PROMPT, EXPLAIN_STEPS))
    on_gpu = engine.parts.device.torch_device.type == "cuda"
    machine = this_machine(probe_machine(gpus=on_gpu), engine.info.threads, on_gpu=on_gpu)
    report = report_of(engine, watch, "decode", machine)
    if report is None:
        raise InternalError("the engine made no decoding step")
    return report
