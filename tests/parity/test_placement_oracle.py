"""Placement against a known answer: a dense model made into a mixture whose output is the dense one's.

Real text through SmolLM2, its feed-forwards split by scripts/split_dense_into_mixture.py. In the file's
own Q4_1 products are float32 in another order: 1e-6 of the largest |logit| seen, 1e-5 allowed. MXFP4 on
the CPU's expert kernels rounds activations to 15 bits, layer after layer: 1.5e-4 seen after 30 (the test
has 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint
from headrace.core.model_spec import ModelSpec
from headrace.experts.cpu_executor import CpuExecutor
from headrace.experts.slab_pack import layout_of, write_slab
from headrace.machine.device import HostDevice
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.registry import cpu_experts, resolve
from headrace.text.tokenizer import load_tokenizer
from scripts.split_dense_into_mixture import (
    NUM_EXPERTS,
    expert_order,
    split,
    with_ffn,
    with_layers,
    write_gguf,
)
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.paging import Pages
from tests.fixtures.smollm2_text import smollm2_path

pytestmark = [needs_native, pytest.mark.smollm2]

FLOAT_BOUND = 1e-5
TERMS_BOUND = 4e-4
TEXT = (
    "A river runs through the valley, and the people who live beside it have learned to read the "
    "water: when it rises, they move their boats to higher ground."
)
Spoil = Callable[[list[torch.Tensor]], None]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(str(smollm2_path()))


@pytest.fixture(scope="module")
def text(smollm2: Checkpoint) -> list[int]:
    return load_tokenizer(smollm2.text).encode(TEXT)


class OnCpu:
    """Experts in slabs, computed by the CPU's expert kernels."""

    def __init__(self, spoil: Spoil | None = None) -> None:
        self._spoil = spoil

    def __call__(self, spec: ModelSpec, experts: Sequence[ExpertWeights]) -> CpuExecutor:
        layout, found = layout_of(experts), list[torch.Tensor]()
        for layer in experts:
            slabs = torch.empty(
                (NUM_EXPERTS, layout.num_slices, layout.slice_nbytes), dtype=torch.uint8
            )
            for e in range(NUM_EXPERTS):
                write_slab(layer, e, layout, slabs[e])
            found.append(slabs)
        if self._spoil is not None:
            self._spoil(found)
        return CpuExecutor(cpu_experts(), [layout] * len(found), found, Activation())


def load(checkpoint: Checkpoint, factory: OnCpu | None = None) -> Decoder:
    ops = resolve(("cpu", "reference"))
    return load_model(checkpoint, ops, HostDevice(), max_positions=128, executor_factory=factory)


def logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Of every position, [len(ids), vocab]."""
    pages = Pages(decoder.spec)
    batch = pages.batch([(pages.sequence(), len(ids))])
    return decoder.logits(decoder.forward(torch.tensor(ids), batch, pages.kv))


def greedy(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    pages = Pages(decoder.spec)
    sequence, found, step = pages.sequence(), [], ids
    for _ in range(count):
        batch = pages.batch([(sequence, len(step))], decode=len(step) == 1)
        hidden = decoder.forward(torch.tensor(step), batch, pages.kv)
        step = [int(decoder.logits(hidden[-1:]).argmax())]
        found += step
    return found


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_a_split_model_gives_the_dense_models_logits_and_greedy_tokens(
    smollm2: Checkpoint, text: list[int]
) -> None:
    dense, mixture = load(smollm2), split(smollm2)
    expected = logits(dense, text)
    everywhere = load(mixture), load(mixture, OnCpu())
    for decoder in everywhere:
        found = logits(decoder, text)
        assert apart(found, expected) < FLOAT_BOUND
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert greedy(everywhere[1], text, 8) == greedy(dense, text, 8)


def test_b028_mxfp4_gives_the_same_greedy_tokens_on_the_expert_kernels(
    smollm2: Checkpoint, text: list[int]
) -> None:
    converted = with_ffn(with_layers(smollm2, 6), "mxfp4")
    expected = logits(load(converted), text)
    mixture = split(converted)
    assert apart(logits(load(mixture), text), expected) < FLOAT_BOUND
    found = logits(load(mixture, OnCpu()), text)
    assert apart(found, expected) < TERMS_BOUND
    # Where the best token leads by more than the kernels can err, it stays the best.
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * TERMS_BOUND * expected.abs().max()
    assert int(clear.sum()) > 0.8 * len(text)
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_routing_depends_on_the_data_and_takes_each_slice_once(
    smollm2: Checkpoint, text: list[int]
) -> None:
    decoder = load(split(with_layers(smollm2, 3)))
    seen: dict[int, torch.Tensor] = {}
    decoder.on_routing = lambda layer, ids: seen.update({layer: ids.clone()})
    logits(decoder, text)
    for layer, ids in seen.items():
        slice_of = torch.empty(NUM_EXPERTS, dtype=torch.int64)
        slice_of[torch.from_numpy(expert_order(layer))] = torch.arange(NUM_EXPERTS) // 2
        slices = slice_of[ids.long()].sort(-1).values
        assert torch.equal(slices, torch.arange(8).expand_as(slices))
        assert len({tuple(sorted(row)) for row in ids.tolist()}) > len(text) // 2
    assert sorted(seen) == [0, 1, 2]


@pytest.mark.parametrize("same_slice", [True, False])
def test_swapping_two_experts_of_different_slices_is_found(
    smollm2: Checkpoint, text: list[int], same_slice: bool
) -> None:
    """Copies of one slice may be swapped, as they are equal; nothing else may."""
    small = with_layers(smollm2, 4)
    order = expert_order(1)
    one, other = int(order[0]), int(order[1 if same_slice else 2])

    def swap(slabs: list[torch.Tensor]) -> None:
        slabs[1][[one, other]] = slabs[1][[other, one]]

    expected = logits(load(small), text)
    found = logits(load(split(small), OnCpu(swap)), text)
    assert (apart(found, expected) < FLOAT_BOUND) is same_slice
    if not same_slice:
        assert apart(found, expected) > 1e-2


@pytest.mark.parametrize("ffn", ["f32", "bf16", "f16"])
def test_float_formats_split_exactly(smollm2: Checkpoint, text: list[int], ffn: str) -> None:
    dense = with_ffn(with_layers(smollm2, 1), ffn)
    found = logits(load(split(dense), OnCpu()), text)
    assert apart(found, logits(load(dense), text)) < FLOAT_BOUND


def test_the_written_file_is_the_split_model(
    smollm2: Checkpoint, text: list[int], tmp_path: Path
) -> None:
    dense = with_ffn(with_layers(smollm2, 1), "mxfp4")
    write_gguf(split(dense), smollm2.path, tmp_path / "mixture.gguf")
    opened = open_checkpoint(str(tmp_path / "mixture.gguf"))
    assert opened.spec.moe is not None
    assert opened.spec.moe.num_experts == NUM_EXPERTS
    assert load_tokenizer(opened.text).encode(TEXT) == text
    assert apart(logits(load(opened), text), logits(load(dense), text)) < FLOAT_BOUND
