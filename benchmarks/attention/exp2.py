"""Bar 03.7: the largest relative error of the degree-3 polynomial for 2^x over [0, 1).

python -m benchmarks.attention.exp2 [--write]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.foundation.common import record
from headrace.ops.reference.exp2 import exp2_polynomial

POINTS = 1 << 22  # evenly spaced; each is an exact float32


def largest_error() -> float:
    x = torch.arange(POINTS, dtype=torch.float32) / POINTS
    exact = torch.exp2(x.double())
    return float(((exp2_polynomial(x).double() - exact) / exact).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the figure in bars.json")
    args = parser.parse_args()
    record(
        "03.7",
        write=args.write,
        command="python -m benchmarks.attention.exp2 --write",
        value=float(f"{largest_error():.3g}"),
        unit="largest relative error of the degree-3 exp2 over [0, 1)",
        note=f"bar 8.8e-5; {POINTS:,} points against float64",
    )


if __name__ == "__main__":
    main()
