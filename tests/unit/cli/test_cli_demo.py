"""``headrace demo``: the replay's rows by hand, and the embedded model end to end."""

from __future__ import annotations

import json

import pytest
import torch

from headrace.cli.demo import PROMPTS, CacheRow, cache_rows, table
from headrace.cli.main import main
from headrace.cli.routing_log import RoutingLog


def test_routing_log_collects_steps_by_layer() -> None:
    log = RoutingLog()
    for step in ([[1, 2], [3, 0]], [[0, 1]]):
        for layer in (0, 2):
            log(layer, torch.tensor(step, dtype=torch.int32) + layer)
    assert log.ids() == [[[1, 2], [3, 0], [0, 1]], [[3, 4], [5, 2], [2, 3]]]


def test_rows_by_hand() -> None:
    # one layer, 4 experts: 0 always, 1 and 2 in turn; half of 4 is 2 slots
    ids = [[[0, 1], [0, 2], [0, 1], [0, 2]]]
    row = cache_rows(ids, 4)[2]
    assert row.slots == 2
    assert row.lru == 3 / 8  # expert 0 from its second use on
    assert row.static == 6 / 8  # {0, 1}
    assert row.belady == 4 / 8  # cold: 0 three times, 1 once
    assert any("50% (  2)" in line and "37.5%" in line for line in table([row], 4, 1, 4))


def test_few_tokens_are_shown_with_a_caution() -> None:
    row = CacheRow(0.5, 2, 0.375, 0.5, 0.5)
    few, many = (" ".join(table([row], tokens, 8, 32)) for tokens in (40, 300))
    assert "40 tokens of routing say little" in few
    assert "say little" not in many


def test_the_demo_writes_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--max-tokens", "8"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [t["prompt"] for t in out["texts"]] == list(PROMPTS)
    assert all(t["text"] for t in out["texts"])
    assert (out["layers"], out["experts"]) == (8, 32)
    assert [c["slots"] for c in out["caches"]] == [38, 64, 128]  # of 256
    for row in out["caches"]:
        assert 0 < row["lru"] <= row["belady"] < 1


def test_the_same_seed_gives_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert main(["demo", "--max-tokens", "6", "--seed", "5"]) == 0
        text, mark, times = capsys.readouterr().out.partition("Where a step's time goes")
        assert mark
        assert "moe-experts" in times
        outputs.append(text)
    assert outputs[0] == outputs[1]
    assert "BELADY" in outputs[0]
