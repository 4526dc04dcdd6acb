"""The benchmarks' engines say tokens that were drawn before, in steps that run ahead as in any engine."""

import logging

import pytest
import torch

from benchmarks.explain.random_models import draw_tokens
from tests.fixtures.late_device import late_engine
from tests.fixtures.toy_engine import answer


def test_drawn_tokens_are_said_and_computed_with(caplog: pytest.LogCaptureFixture):
    engine, device = late_engine()
    vocab = 60  # bytes of the toy's texts that are no end
    draw_tokens(engine, vocab, seed=3)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(vocab, (10_007,), generator=generator).tolist()
    prompt = [65, 66, 67]
    found = answer(engine, prompt, max_tokens=12, ignore_eos=True)
    assert found.token_ids == ids[3:15]
    assert device.replays == 11  # all but the prompt's step were launched
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
