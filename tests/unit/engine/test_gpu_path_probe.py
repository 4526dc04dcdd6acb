"""Layers that are tried with random routes, on the CPU: what is counted, and what stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace.engine.gpu_path_probe as probing
from headrace.core.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.gpu_path_probe import probe_paths
from headrace.experts.live import LiveExperts
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_engine import SLICE_NBYTES, SLICES, ExpertEngine
from tests.fixtures.host_marks import HostMarks
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.toy_engine import answer

PROMPT, TOKENS = (5, 9, 200, 17, 3, 44), 12
STEPS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_gpt_oss(tmp_path_factory.mktemp("toy")).path)


@needs_native
@pytest.mark.parametrize("mode", ["hybrid", "stream", "cpu", "gpu"])
def test_tried_layers_are_counted_and_answers_stay_the_same(
    mode: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("WARM_UP", 1), ("LEAST", STEPS), ("MOST", STEPS)):
        monkeypatch.setattr(probing, name, value)
    made = ExpertEngine(model, mode=mode, slots=99 if mode == "gpu" else 12)
    try:
        experts = made.engine.parts.experts
        assert isinstance(experts, LiveExperts)
        found = probe_paths(experts, made.engine.parts.device, HostMarks())
        if mode == "gpu":  # nothing can miss
            assert found == {}
        else:
            assert {name: rate.unit for name, rate in found.items()} == {
                "experts_layers": "s", "experts_missed": "GB/s",
            }  # fmt: skip
            # Bytes of a step, however long it took: whole slices of at most 2 layers x 2 experts.
            nbytes = found["experts_missed"].value * 1e9 * found["experts_layers"].value
            slices = nbytes * STEPS / SLICE_NBYTES
            assert slices == pytest.approx(round(slices), abs=1e-6)
            assert 0 < slices <= STEPS * 2 * 2 * SLICES
            if mode == "cpu":  # there are no slots: everything misses
                assert slices == pytest.approx(STEPS * 2 * 2 * SLICES)
        reference = Engine.load(
            EngineConfig(str(model), context=128, device="cpu", backend="reference")
        )
        wanted = answer(reference, PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids
        assert answer(made.engine, PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids == wanted
    finally:
        made.engine.close()
