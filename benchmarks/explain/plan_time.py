"""How long `headrace plan` takes from the shell, and whether it imports torch: one JSON object.

python -m benchmarks.explain.plan_time [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

BAR_S = 1.0
CASES = {
    "a mixture beyond VRAM": ["gpt-oss-120b", "--machine", "rtx-5070-ti"],
    "does not fit": ["glm-5.2", "--machine", "rtx-4090"],
    "this machine": ["gpt-oss-20b"],
    "six machines": [
        "gpt-oss-120b",
        "--compare",
        "rtx-4060-laptop,rtx-5070-ti,rtx-5090,h200,mi300x,wse-3",
    ],
}
PROGRAM = """
import sys
from headrace.cli.main import main
code = main(["plan", *sys.argv[1:]])
print("TORCH" if "torch" in sys.modules else "CLEAN", file=sys.stderr)
raise SystemExit(code)
"""


def measure(words: list[str], runs: int) -> dict[str, Any]:
    seconds: list[float] = []
    imports_torch = False
    for _ in range(runs):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True
        )
        seconds.append(time.perf_counter() - start)
        imports_torch |= done.stderr.strip().endswith("TORCH")
    return {
        "minimum_s": min(seconds),
        "median_s": median(seconds),
        "maximum_s": max(seconds),
        "imports_torch": imports_torch,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = {name: measure(words, args.runs) for name, words in CASES.items()}
    holds = all(c["median_s"] < BAR_S and not c["imports_torch"] for c in cases.values())
    text = json.dumps({"bar_s": BAR_S, "holds": holds, "runs": args.runs, "cases": cases}, indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
