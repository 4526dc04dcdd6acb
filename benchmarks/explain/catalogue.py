"""Bar 04.1: how many classes of operations the catalogue has, and whether its checks hold.

python -m benchmarks.explain.catalogue [--write]
"""

from __future__ import annotations

import argparse

from benchmarks.foundation.common import record
from headrace.explain.catalogue.evaluate import run_checks
from headrace.explain.catalogue.load import load_catalogue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the figure in bars.json")
    args = parser.parse_args()
    catalogue = load_catalogue()
    results = run_checks(catalogue)
    held = sum(result.holds for result in results)
    record(
        "04.1",
        write=args.write,
        command="python -m benchmarks.explain.catalogue --write",
        value=len(catalogue.records),
        unit="FLOP classes",
        note=f"{held} of {len(results)} checks and cases of rules hold; no record has a field for a bound",
    )


if __name__ == "__main__":
    main()
