"""The table of rotary angles, and the rules that stretch it over long contexts."""

from __future__ import annotations

import math

import torch

from headrace.core.model_spec import RopeSpec
from headrace.ops.records import RopeTable


def build_rope_table(
    spec: RopeSpec,
    num_positions: int,
    *,
    interleaved: bool = False,
    divisors: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> RopeTable:
    """Work out cosines and sines in float64 and round them once.

    Args:
        spec: base, rotated dimensions and the rule of scaling.
        num_positions: rows of the table.
        interleaved: how query and key rows pair up, see ``RopeTable``.
        divisors: [dim / 2], divide the frequencies (what GGUF stores as ``rope_freqs``).
        device: where the table lives.
    """
    frequencies, factor = rope_frequencies(spec)
    if divisors is not None:
        frequencies = frequencies / divisors.double()
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return RopeTable(
        cos=(angles.cos() * factor).float().to(device),
        sin=(angles.sin() * factor).float().to(device),
        interleaved=interleaved,
    )


def rope_frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Return radians per position, float64 [dim / 2], and the factor of cosines and sines."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float64) / spec.dim
    plain = spec.theta**-exponents
    if spec.scaling == "linear":
        return plain / spec.factor, 1.0
    if spec.scaling == "llama3":
        return _llama3(plain, spec), 1.0
    if spec.scaling == "yarn":
        given = spec.attention_factor
        return _yarn(plain, spec), yarn_factor(spec.factor) if given is None else given
    return plain, 1.0


def yarn_factor(factor: float) -> float:
    """YaRN's temperature, 0.1 ln(s) + 1 (Peng et al. 2023, eq. 22), applied to both q and k."""
    return 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1's bands: short waves stay, long ones stretch by ``factor``, a ramp lies between.

    Source: the model's published reference code (llama-models, ``apply_scaling``).
    """
    turns = spec.original_context * plain / (2 * math.pi)  # over the original context
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / spec.factor)


def _yarn(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """YaRN's "NTK by parts" (Peng et al. 2023, section 3.2), over indices of dimensions.

    Dimensions that turn more than ``beta_fast`` times within the original context keep their
    frequency, those that turn less than ``beta_slow`` times are divided by ``factor``.
    """

    def index_of(turns: float) -> float:
        wave = spec.original_context / (turns * 2 * math.pi)
        return spec.dim * math.log(wave) / (2 * math.log(spec.theta))

    low, high = index_of(spec.beta_fast), index_of(spec.beta_slow)
    if spec.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, spec.dim - 1.0)
    if low == high:
        high += 0.001  # the published code's guard against dividing by zero
    index = torch.arange(spec.dim // 2, dtype=torch.float64)
    stretched = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (1.0 - stretched + stretched / spec.factor)
