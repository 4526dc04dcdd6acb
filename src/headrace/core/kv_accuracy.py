"""How accurate each KV format was measured to be, by architecture: what ``--kv-format auto`` goes by.

Every row comes from ``benchmarks/attention/accuracy.py``, or its perplexity from ``perplexity.py`` there; a
format *holds* on an architecture when its perplexity at the longest context measured is within 1 % of that
with bf16: a perplexity that falls by more says that the model has changed as much as one that rises.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLDS_WITHIN = 0.01


@dataclass(frozen=True)
class KVAccuracy:
    """One measurement.

    kl: mean Kullback-Leibler divergence to float32 keys and values, in nats a token
    perplexity_change: relative to bf16, positive is worse
    rank: residual scalars per token (0: not calibrated)
    """

    family: str
    model: str
    kv_format: str
    rank: int
    context: int
    kl: float
    perplexity_change: float
    source: str

    @property
    def holds(self) -> bool:
        return abs(self.perplexity_change) <= HOLDS_WITHIN


_SOURCE = "benchmarks/results/attention/accuracy.json, 2026-11-30"
# Over 8,163 positions instead of 1,024: benchmarks/attention/perplexity.py.
_CLOSER = "benchmarks/results/attention/perplexity.json, 2026-11-30"

MEASURED: tuple[KVAccuracy, ...] = (
    KVAccuracy("llama", "SmolLM2-135M", "nvfp4k-fp8v", 4, 8192, 0.00476, 0.0064, _SOURCE),
    KVAccuracy("llama", "SmolLM2-135M", "fp8", 0, 8192, 0.00364, 0.0005, _SOURCE),
    KVAccuracy("llama", "SmolLM2-135M", "nvfp4k-fp8v", 0, 8192, 0.01056, 0.0101, _SOURCE),
    KVAccuracy("gemma3_text", "Gemma 3 270M", "nvfp4k-fp8v", 4, 32768, 0.00905, 0.0084, _CLOSER),
    KVAccuracy("gemma3_text", "Gemma 3 270M", "nvfp4k-fp8v", 0, 32768, 0.01319, 0.0172, _SOURCE),
    KVAccuracy("gemma3_text", "Gemma 3 270M", "fp8", 0, 32768, 0.00506, 0.0010, _SOURCE),
)

# From the smallest to the largest; bf16 rounds keys and values once and holds everywhere.
_BY_SIZE = ("nvfp4k-fp8v", "fp8")
FALLBACK = "bf16"


def smallest_that_holds(
    family: str, *, rank: int, usable: frozenset[str], measured: tuple[KVAccuracy, ...] = MEASURED
) -> tuple[str, str]:
    """The smallest format whose accuracy on ``family`` is known to hold, and why.

    Args:
        rank: residual scalars that are calibrated for this model; a measurement with more of them says
            nothing about it.
        usable: formats that the back-end has kernels for.
    """
    rejected: list[str] = []
    for name in _BY_SIZE:
        rows = [m for m in measured if m.family == family and m.kv_format == name]
        if name not in usable:
            rejected.append(f"{name} has no kernel here")
            continue
        fitting = [m for m in rows if m.rank <= rank]
        best = max(fitting, key=lambda m: (m.rank, m.context), default=None)
        if best is None:
            why = "is measured with calibrated directions only" if rows else "is not measured"
            rejected.append(f"{name} {why} on {family}")
        elif not best.holds:
            why = f"{name} changes {best.model}'s perplexity by {_percent(best)}"
            rejected.append(why + _if_calibrated(rows, rank))
        else:
            said = (
                f"the smallest that holds (within {HOLDS_WITHIN:.0%} of bf16's perplexity) on {family}: "
                f"{_percent(best)} on {best.model} at {best.context} tokens ({best.source})"
            )
            return name, "; ".join([said, *rejected])
    return FALLBACK, "; ".join(rejected)


def _if_calibrated(rows: list[KVAccuracy], rank: int) -> str:
    """What calibration would make of a format that does not hold without it."""
    better = [m for m in rows if m.rank > rank and m.holds]
    if not better:
        return ""
    best = max(better, key=lambda m: m.context)
    return (
        f" without calibrated directions, {_percent(best)} with them (`headrace calibrate`, once)"
    )


def _percent(row: KVAccuracy) -> str:
    return f"{100 * row.perplexity_change:+.2f} %"
