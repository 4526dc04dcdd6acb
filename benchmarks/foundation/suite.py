"""Bar 01.6: how long the CPU test suite takes.

python -m benchmarks.foundation.suite [--write]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.foundation.common import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = time.perf_counter() - start
    closing = done.stdout.strip().splitlines()[-1]
    print(closing, file=sys.stderr)
    if done.returncode:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
    record(
        "01.6",
        write=args.write,
        command="python -m benchmarks.foundation.suite --write",
        value=round(seconds),
        unit="s for the CPU test suite",
        note=closing.strip("= "),
    )


if __name__ == "__main__":
    main()
