"""What the loader refuses, what it copies and what it only looks at."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint, RawTensor
from headrace.core.errors import CheckpointError
from headrace.core.weight_shapes import num_parameters
from headrace.formats.base import PackedTensor
from headrace.machine.device import HostDevice
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.models.weights import WeightSource, split_rows
from headrace.ops.registry import resolve
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.tiny_models import CONFIGS, expected_logits, make_model, prompt, save_model


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(str(path))


def load(checkpoint: Checkpoint) -> Decoder:
    return load_model(checkpoint, resolve(["reference"]), HostDevice(), max_positions=64)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(save_model(make_model("qwen3_moe"), tmp_path_factory.mktemp("moe")))


def changed(checkpoint: Checkpoint, **tensors: RawTensor | None) -> Checkpoint:
    """``checkpoint`` with tensors replaced (dots are written as double underscores) or removed."""
    new = dict(checkpoint.tensors)
    for key, value in tensors.items():
        name = key.replace("__", ".")
        if value is None:
            del new[name]
        else:
            new[name] = value
    return dataclasses.replace(checkpoint, tensors=new)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_counts_match_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    spec = opened(save_model(model, tmp_path)).spec
    assert num_parameters(spec).total == model.num_parameters()


def test_missing_weight_is_named_as_stored(mixture: Checkpoint) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(changed(mixture, layers__2__experts__3__up=None))
    assert "model.layers.2.mlp.experts.3.up_proj.weight is missing" in caught.value.message
    assert "[32, 64]" in caught.value.message


def test_wrong_shape_says_found_and_expected(mixture: Checkpoint) -> None:
    wrong = dataclasses.replace(mixture.tensors["layers.0.q"], shape=(64, 32))
    with pytest.raises(CheckpointError) as caught:
        load(changed(mixture, layers__0__q=wrong))
    assert "[64, 32]" in caught.value.message
    assert "[64, 64]" in caught.value.message


def test_weight_without_a_place_is_refused(mixture: Checkpoint) -> None:
    extra = dataclasses.replace(mixture.tensors["layers.0.q"], name="layers.0.sinks")
    with pytest.raises(CheckpointError, match=r"no place for 'layers\.0\.sinks'"):
        load(changed(mixture, layers__0__sinks=extra))


def test_matrices_are_views(mixture: Checkpoint) -> None:
    source = WeightSource(mixture, torch.device("cpu"))
    raw = mixture.tensors["layers.0.q"]
    packed = source.packed("layers.0.q", tuple(raw.shape))
    assert packed.parts["data"].data_ptr() == raw.parts["data"].ctypes.data


def test_two_byte_floats_are_views(mixture: Checkpoint) -> None:
    bits = np.array([[0x3F80, 0xC000]], dtype=np.uint16)  # 1.0 and -2.0 in bfloat16
    raw = RawTensor("layers.0.q", "bf16", (1, 2), {"data": bits}, "test")
    source = WeightSource(changed(mixture, layers__0__q=raw), torch.device("cpu"))
    data = source.packed("layers.0.q", (1, 2)).parts["data"]
    assert data.dtype == torch.bfloat16
    assert data.tolist() == [[1.0, -2.0]]
    assert data.data_ptr() == bits.ctypes.data


@pytest.mark.parametrize("name", ["qwen3_moe-step", "mixtral"])
def test_fused_experts_load_as_well(name: str, tmp_path: Path) -> None:
    """transformers holds gate and up as two halves of one stacked tensor; some files do, too."""
    model = make_model(name)
    save_model(model, tmp_path)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    checkpoint = opened(tmp_path)
    assert any(key.endswith("experts.gate_up") for key in checkpoint.tensors)
    decoder = load(checkpoint)
    pages = Pages(decoder.spec)
    ids = prompt(20)
    hidden = decoder.forward(torch.tensor(ids), pages.batch([(pages.sequence(), 20)]), pages.kv)
    want = expected_logits(model, ids)
    assert (decoder.logits(hidden) - want).abs().max() <= 2e-5 * want.abs().max()


def test_progress_ends_at_one(mixture: Checkpoint) -> None:
    seen: list[tuple[str, float]] = []
    load_model(
        mixture,
        resolve(["reference"]),
        HostDevice(),
        max_positions=8,
        progress=lambda stage, done: seen.append((stage, done)),
    )
    assert seen == [("weights", pytest.approx((i + 1) / 3)) for i in range(3)]


def test_split_rows_of_every_layout() -> None:
    codes = torch.arange(2 * 4 * 16, dtype=torch.uint8).view(2, 4, 16)
    scales = torch.arange(2 * 4 * 2, dtype=torch.uint8).view(2, 4, 2)
    whole = torch.tensor([0.5, 2.0])
    packed = PackedTensor(
        "nvfp4", (2, 4, 32), {"codes": codes, "scales": scales, "global_scale": whole}
    )
    gate, up = split_rows(packed, interleaved=True)
    assert gate.shape == up.shape == (2, 2, 32)
    assert torch.equal(gate.parts["codes"], codes[:, [0, 2]])
    assert torch.equal(up.parts["scales"], scales[:, [1, 3]])
    assert torch.equal(up.parts["global_scale"], whole)
    assert gate.parts["codes"].data_ptr() == codes.data_ptr()  # a view
    gate, up = split_rows(packed, interleaved=False)
    assert torch.equal(gate.parts["codes"], codes[:, :2])
    assert torch.equal(up.parts["codes"], codes[:, 2:])


def test_split_of_fp8_blocks_that_cross_is_refused() -> None:
    parts = {"codes": torch.zeros(1, 192, 8, dtype=torch.uint8), "scale": torch.ones(1, 2, 1)}
    with pytest.raises(CheckpointError, match="192 rows"):
        split_rows(PackedTensor("fp8_e4m3", (1, 192, 8), parts), interleaved=False)
