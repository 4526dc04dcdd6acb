"""Rotary frequencies against transformers' and numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.core.model_spec import RopeSpec
from headrace.layers.rope import build_rope_table, rope_frequencies, yarn_factor

YARN = RopeSpec(150000.0, 64, "yarn", 32.0, 4096, truncate=False)
LLAMA3 = RopeSpec(500000.0, 128, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def theirs(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    parameters: dict[str, Any] = {
        "rope_type": spec.scaling,
        "rope_theta": spec.theta,
        "factor": spec.factor,
        "original_max_position_embeddings": spec.original_context,
        "low_freq_factor": spec.low_freq_factor,
        "high_freq_factor": spec.high_freq_factor,
        "truncate": spec.truncate,
        "attention_factor": spec.attention_factor,
    }
    known = {
        "linear": ("factor",),
        "llama3": (
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        ),
        "yarn": ("factor", "original_max_position_embeddings", "truncate", "attention_factor"),
    }[spec.scaling]
    kept = {k: v for k, v in parameters.items() if k in known or k.startswith("rope_")}
    config = transformers.LlamaConfig(
        hidden_size=spec.dim * 2,
        num_attention_heads=2,
        head_dim=spec.dim,
        max_position_embeddings=int(spec.original_context * spec.factor) or 4096,
        rope_parameters={k: v for k, v in kept.items() if v is not None},
    )
    return ROPE_INIT_FUNCTIONS[spec.scaling](config, torch.device("cpu"))


@pytest.mark.parametrize(
    "spec",
    [
        YARN,
        RopeSpec(1e6, 128, "yarn", 4.0, 32768),
        RopeSpec(10000.0, 16, "yarn", 8.0, 64, attention_factor=1.5),
        LLAMA3,
        RopeSpec(10000.0, 64, "linear", 2.5),
    ],
)
def test_frequencies_match_transformers(spec: RopeSpec) -> None:
    want, want_factor = theirs(spec)
    got, factor = rope_frequencies(spec)
    assert factor == pytest.approx(want_factor, rel=1e-7)
    # Theirs are float32 powers of a float32 base: a few units in the last place.
    assert torch.allclose(got, want.double(), rtol=2e-6, atol=0)


def test_gpt_oss_by_hand() -> None:
    """0.1 ln 32 + 1; the fastest pair is untouched, the slowest is divided by 32."""
    frequencies, factor = rope_frequencies(YARN)
    assert factor == pytest.approx(1.3465735902799727)
    assert frequencies[0] == 1.0
    assert frequencies[-1].item() == pytest.approx(150000.0 ** -(62 / 64) / 32)
    assert yarn_factor(1.0) == 1.0


def test_table_is_exact_at_far_positions() -> None:
    table = build_rope_table(RopeSpec(10000.0, 8), 100001)
    angle = 100000 * 10000.0**-0.25
    assert table.cos[100000, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert table.sin[100000, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)
    assert table.cos.dtype == torch.float32


def test_divisors_stretch_frequencies() -> None:
    table = build_rope_table(RopeSpec(10000.0, 4), 3, divisors=torch.tensor([1.0, 4.0]))
    assert table.sin[2, 0].item() == pytest.approx(math.sin(2.0))
    assert table.sin[2, 1].item() == pytest.approx(math.sin(2 * 0.01 / 4))
