"""A GGUF model of mixed block types gives the float64 model's logits and tokens wherever its experts lie."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.engine.loading import model_sizes
from headrace.experts.building import make_executor
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.host_paths import HostPaths
from headrace.experts.slab_pack import layouts_of
from headrace.experts.split import PathRates
from headrace.experts.store import HostLimits, HostStore, build_store
from headrace.machine.device import HostDevice
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops.records import Activation
from headrace.ops.registry import cpu_experts, resolve
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.llama_cpp_greedy import greedy
from tests.fixtures.mixed_gguf import FALL_BACK, INNER, Q4_K_M, MixedModel, write_mixed
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)

COUNT = 6
RATES = PathRates(pcie_gbps=40.0, cpu_gbps=60.0, slice_nbytes=4096)
# name: placement, slots. Two layers of four experts, in slices of 256 columns.
PLACES = {
    "all on the GPU": ("gpu", 1000),
    "all on the CPU": ("cpu", 0),
    "mixed": ("hybrid", 14),
    "one slot": ("hybrid", 9),  # eight are in transit
    "thrashing": ("stream", 11),
}
# Prompts after which these models' choices are clear, out of 256 random ones.
KINDS = {
    "q4_k_m": (Q4_K_M, [163, 139, 94, 207, 108]),
    "fall back": (FALL_BACK, [130, 86, 70, 104, 28]),
}


@dataclass(frozen=True)
class Case:
    """A model, a prompt, and float64's logits and greedy tokens."""

    mixed: MixedModel
    prompt: list[int]
    logits: np.ndarray
    tokens: list[int]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kinds, prompt = KINDS[request.param]
    made = write_mixed(tmp_path_factory.mktemp("mixed") / "model.gguf", kinds, seed=2)
    tokens, lead = made.greedy(prompt, COUNT)
    assert lead > 1.0, "choices of this model are clear"
    return Case(made, prompt, made.logits(prompt), tokens)


@contextmanager
def loaded(
    mixed: MixedModel, place: str | None, disk: Path | None = None
) -> Generator[Decoder, None, None]:
    """The decoder with its experts in memory (None), or placed so, computed by the CPU's kernels."""
    executors: list[HybridExecutor] = []

    def factory(spec, experts) -> HybridExecutor:
        layouts = layouts_of(experts)
        ram = 0 if disk is not None else 1 << 30
        store = build_store(
            experts, layouts, threads=1, pin=False, disk=disk, limits=HostLimits(ram, 0)
        )
        placement, slots = PLACES[place or "mixed"]
        everything = store.num_layers * store.num_experts * store.layout.num_slices
        shape = ExecutorShape(placement, 4, spec.moe.num_experts_per_token, min(slots, everything))

        def paths(device, store: HostStore, shape, act, fields, block, top_k, *, max_tokens):
            return HostPaths(store, shape, act, cpu_experts())

        executors.append(
            make_executor(
                HostDevice(), store, shape, Activation(), threads=1, rates=RATES, new_paths=paths
            )
        )
        return executors[0]

    yield load_model(
        open_checkpoint(str(mixed.path)), resolve(("cpu", "reference")), HostDevice(),
        max_positions=64, executor_factory=None if place is None else factory,
    )  # fmt: skip
    for executor in executors:
        executor.close()


def run(decoder: Decoder, prompt: list[int], count: int) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt, and greedy tokens."""
    pages = Pages(decoder.spec)
    sequence, step, found = pages.sequence(), prompt, list[int]()
    first = None
    for _ in range(count):
        batch = pages.batch([(sequence, len(step))], decode=len(step) == 1)
        logits = decoder.logits(decoder.forward(torch.tensor(step), batch, pages.kv))
        first = logits.double().numpy() if first is None else first
        step = [int(logits[-1].argmax())]
        found += step
    assert first is not None
    return first, found


def check(case: Case, place: str | None, disk: Path | None = None) -> None:
    with loaded(case.mixed, place, disk) as decoder:
        logits, found = run(decoder, case.prompt, COUNT)
    # Matrices have 15 bits of each block's largest activation, through two layers and the norms.
    assert np.abs(logits - case.logits).max() / np.abs(case.logits).max() < 2e-3
    assert found == case.tokens


def test_the_experts_of_every_layer_are_known_before_loading(case: Case) -> None:
    kinds = model_sizes(open_checkpoint(str(case.mixed.path))).expert_kinds
    assert tuple(kind[:2] for kind in kinds) in [k for k, _ in KINDS.values()]
    assert not any(blocked for *_, blocked in kinds)


def test_in_memory(case: Case) -> None:
    check(case, None)


@needs_native
@pytest.mark.parametrize("place", PLACES)
def test_b028_every_placement_of_mixed_block_types(case: Case, place: str) -> None:
    check(case, place)


@needs_native
def test_b028_mixed_block_types_from_disk(case: Case, tmp_path: Path) -> None:
    check(case, "mixed", tmp_path)


def test_slices_are_cut_alike_and_as_long_as_their_formats(tmp_path: Path) -> None:
    """Q4_K: 4.5 bits, Q6_K: 6.5625 bits of 256 x 512 gate, up and down, half in each of two slices."""
    layouts = []

    def keep(spec, experts):
        layouts.extend(layouts_of(experts))
        raise KeyboardInterrupt

    made = write_mixed(tmp_path / "m.gguf")
    with pytest.raises(KeyboardInterrupt):
        load_model(
            open_checkpoint(str(made.path)), resolve(("reference",)), HostDevice(),
            max_positions=64, executor_factory=keep,
        )  # fmt: skip
    assert [layout.num_slices for layout in layouts] == [2, 2]
    matrix = 256 * INNER // 2
    nbytes = [int(matrix * (2 * 4.5 + down) / 8) for down in (6.5625, 4.5)]
    pages = [-(-n // 4096) * 4096 for n in nbytes]
    assert [layout.slice_nbytes for layout in layouts] == pages
    assert pages[0] > pages[1]


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_llama_cpp_gives_the_same_tokens(case: Case) -> None:
    """Its activations have 8 bits in blocks of 32 or 256: the model's choices are clear enough."""
    assert greedy(case.mixed.path, case.prompt, COUNT) == case.tokens
