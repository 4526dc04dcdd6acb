"""The trainer on a toy: resuming, determinism, and the lift of starving experts."""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from training.model import FLOOR, SHAPES, MixtureModel
from training.train import Batches, learning_rate, train


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    folder = tmp_path / "ids"
    folder.mkdir()
    tokens = np.random.default_rng(0).zipf(1.5, 20_000).clip(max=511).astype(np.uint16)
    (folder / "train.bin.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=0))
    return folder


def arguments(ids: Path, out: Path, **changes: object) -> argparse.Namespace:
    values = {
        "ids": ids, "out": out, "shape": "toy", "minutes": 1.0, "steps": 10, "stop_after": 0,
        "batch_tokens": 128, "peak_lr": 0.0, "nudge": 0.02, "seed": 3,
        "log_every": 1, "resume": False, "cpu": True,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def assert_same(one: MixtureModel, other: MixtureModel) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_resuming_equals_an_uninterrupted_run(ids: Path, tmp_path: Path) -> None:
    """Bit for bit, log included; the pause lies before the rounding of the experts begins."""
    whole = train(arguments(ids, tmp_path / "whole"))
    train(arguments(ids, tmp_path / "parts", stop_after=5))
    resumed = train(arguments(ids, tmp_path / "parts", resume=True))
    assert_same(whole, resumed)
    logs = [json.loads((tmp_path / n / "log.json").read_text()) for n in ("whole", "parts")]
    without_seconds = [[[r[0], *r[2:]] for r in log["rows"]] for log in logs]
    assert without_seconds[0] == without_seconds[1]
    assert len(without_seconds[0]) == 10


def test_the_seed_decides(ids: Path, tmp_path: Path) -> None:
    one, same = (train(arguments(ids, tmp_path / n, steps=3)) for n in "ab")
    assert_same(one, same)
    other = train(arguments(ids, tmp_path / "c", steps=3, seed=4))
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokens = np.arange(60_000, dtype=np.uint16) % 40_000  # above 2^15: ids are unsigned
    batches = Batches(tokens, SHAPES["toy"], 128, 7, "cpu")
    x, y = batches.get(5)
    assert x.shape == y.shape == (2, 64)
    assert torch.equal(batches.get(5)[0], x)
    assert not torch.equal(batches.get(6)[0], x)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert int(x.min()) >= 0
    assert torch.equal((x + 1) % 40_000, y)


def test_learning_rate_ends() -> None:
    assert learning_rate(0.01, 1.0) == pytest.approx(0.5)  # half of the warm-up of 2%
    assert learning_rate(0.02, 1.0) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.02)


def test_only_starving_experts_are_lifted() -> None:
    model = MixtureModel(SHAPES["toy"])
    shares = torch.full((2, 8), 1 / 8)
    shares[0, 3] = 0.0
    shares[1, 5] = FLOOR / 16  # half of the floor
    before = [layer.moe.router.bias.clone() for layer in model.layers]
    model.feed_the_starving(shares, 0.5)
    lifts = [layer.moe.router.bias - b for layer, b in zip(model.layers, before, strict=True)]
    want = torch.zeros(2, 8)
    want[0, 3], want[1, 5] = 0.5, 0.25
    torch.testing.assert_close(torch.stack(lifts), want)
