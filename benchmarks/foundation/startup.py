"""Bar 01.5, and the peak memory of a 2,048-token chat.

python -m benchmarks.foundation.startup [--write]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import psutil

from benchmarks.foundation.common import record, smollm2_path

ROUNDS = 5


def help_seconds() -> float:
    """The quickest of a few runs of ``headrace --help``."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run(["headrace", "--help"], check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - start)
    return best


def first_token_seconds() -> float:
    """From the command to the first byte of the answer; the weights are in the page cache."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        command = ["headrace", "run", "smollm2", "-p", "What is the capital of France?"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            child.stdout.read(1)
            best = min(best, time.perf_counter() - start)
            child.stdout.read()
    return best


def peak_resident_nbytes() -> int:
    """Largest sum of resident memory over our processes while 2,048 tokens are in the context."""
    text = " ".join(f"item {i}" for i in range(400))  # about 1,950 tokens
    command = ["headrace", "run", "smollm2", "-p", text, "--context", "2048", "--json"]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr) as child:
        root = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                family = [root, *root.children(recursive=True)]
                peak = max(peak, sum(p.memory_info().rss for p in family))
            except psutil.Error:
                pass
            time.sleep(0.02)
        assert child.stdout is not None
        print(child.stdout.read().decode()[-400:], file=sys.stderr)
    if child.returncode:
        raise SystemExit(f"headrace run ended with {child.returncode}")
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    help_s, first_s = help_seconds(), first_token_seconds()
    peak, file = peak_resident_nbytes(), smollm2_path().stat().st_size
    record(
        "01.5",
        write=args.write,
        command="python -m benchmarks.foundation.startup --write",
        value=round(first_s, 2),
        unit="s from command to first token",
        note=(
            f"headrace --help {help_s:.3f} s; best of {ROUNDS} each. Peak resident memory of a "
            f"2,048-token chat {peak / 1e6:.0f} MB: the weights' {file / 1e6:.0f} MB plus "
            f"{(peak - file) / 1e6:.0f} MB (limit 700)"
        ),
    )


if __name__ == "__main__":
    main()
