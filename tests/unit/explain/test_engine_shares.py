"""What of a machine's rates the engine is taken to reach, by class, place and phase."""

from __future__ import annotations

import pytest

from headrace.explain import leaf
from headrace.explain.cost import Work
from headrace.explain.engine_model import engine_model
from headrace.explain.step_cost import Leaf
from tests.fixtures.running_models import machine


def share(ident: str, path: str, resource: str, *, prompt: bool = False) -> float:
    """On a measured machine, whose rates are reached as they are."""
    one = Leaf(ident, 1, Work(), path)  # type: ignore[arg-type]
    return engine_model("headrace").efficiency(one, machine(), prompt=prompt)[resource]


def test_products_of_prompts_unpack_each_weight_once():
    for ident in (leaf.QKV, leaf.O_PROJECTION, leaf.DENSE_FFN):
        assert share(ident, "cpu", "cpu") == 0.3
        assert share(ident, "cpu", "cpu", prompt=True) == 0.83
        assert share(ident, "gpu", "cpu", prompt=True) == 0.3
    # A piece of a prompt has a few tokens of each expert only, and one row of logits.
    assert share(leaf.EXPERTS_CPU, "misses", "cpu", prompt=True) == 0.3
    assert share(leaf.LM_HEAD, "cpu", "cpu", prompt=True) == 0.3


def test_attention_on_a_cpu_is_far_from_reading_and_from_multiplying():
    assert share(leaf.ATTENTION_DECODE, "cpu", "dram") == 0.44
    assert share(leaf.ATTENTION_PREFILL, "cpu", "cpu", prompt=True) == 0.47
    assert share(leaf.ATTENTION_DECODE, "gpu", "dram") == pytest.approx(0.85)
