"""Memory that is not granted while a model is loaded is an error that says which."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.checkpoint import mapped
from headrace.core.config import EngineConfig
from headrace.core.errors import CheckpointError, DoesNotFitError, InternalError, outcome_of
from headrace.engine import loading
from headrace.engine.engine import Engine
from headrace.models import loader
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.toy_engine import answer

TORCH = RuntimeError(
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 12 bytes"
)
LOCKED = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_gpt_oss(tmp_path_factory.mktemp("toy")).path)


def load(model: Path) -> Engine:
    return Engine.load(EngineConfig(str(model), context=128, device="cpu", backend="reference"))


@pytest.mark.parametrize(
    ("module", "name", "error", "planned"),
    [
        (loading, "open_checkpoint", MemoryError(), False),
        (loader, "build_rope_table", TORCH, True),
        (loader, "DecoderLayer", MemoryError("std::bad_alloc"), True),
        (loading, "capture_graphs", LOCKED, True),
        (loading, "load_tokenizer", MemoryError(), True),
    ],
)
def test_b029_host_memory_that_is_not_granted_is_said_and_the_next_load_works(
    model: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Exception, planned: bool
):  # fmt: skip
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    expected = answer(load(model), [5, 9, 200], max_tokens=4, ignore_eos=True).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        with pytest.raises(DoesNotFitError, match=r"host memory .*ran out while the") as caught:
            load(model)
    assert ("against the plan: weights" in caught.value.message) is planned
    assert "\n" not in caught.value.message
    assert str(error).split("\n")[0] in caught.value.message
    assert "--context" in str(caught.value.hint)
    assert outcome_of(caught.value).exit_code == 3
    assert answer(load(model), [5, 9, 200], max_tokens=4, ignore_eos=True).token_ids == expected


def test_b029_a_gpu_that_is_full_is_told_from_a_full_host():
    plans: Any = SimpleNamespace(
        vram=SimpleNamespace(describe=lambda: "the GPU's"),
        plan=SimpleNamespace(describe=lambda: "the host's"),
    )
    for error, words, hint in (
        (torch.OutOfMemoryError("CUDA oom"), "GPU memory ran out .* plan: the GPU's: CUDA", "--vram"),
        (TORCH, "host memory ran out .* plan: the host's: .*DefaultCPUAllocator", "--ram"),
        (
            LOCKED,
            "host memory that a GPU reads, or the GPU's own, ran out .* plan: the host's: CUDA error: out of",
            "nvidia-smi",
        ),
    ):  # fmt: skip
        with (
            pytest.raises(DoesNotFitError, match=words) as caught,
            loading._lack_of_memory_told(plans),
        ):
            raise error
        assert hint in str(caught.value.hint)
        assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [InternalError("x"), ValueError("can't allocate memory"), OSError(errno.EIO, "x")]
)
def test_other_faults_of_a_load_stay_what_they_are(error: Exception):
    with pytest.raises(type(error)) as caught, loading._lack_of_memory_told():
        raise error
    assert caught.value is error


def test_b029_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(2_500_000))

    def refuses(number: int) -> Any:
        def call(*args: Any) -> Any:
            raise OSError(number, "no such luck")

        return call

    monkeypatch.setattr(mapped, "_map", refuses(errno.ENOMEM))
    with pytest.raises(DoesNotFitError, match=r"model\.safetensors: no such luck .* 2\.5 MB"):
        mapped.MappedFile(path)
    monkeypatch.setattr(mapped, "_map", refuses(errno.EACCES))
    with pytest.raises(CheckpointError, match="cannot be read"):
        mapped.MappedFile(path)
