"""Products with packed matrices against float64 of what their bytes stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.block_planes import PACKED_FORMATS
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.engine.engine import Engine
from headrace.formats.base import PackedTensor
from headrace.models.weights import to_packed
from headrace.ops.records import Activation
from headrace.ops.registry import resolve
from tests.fixtures.cpu_oracle import random_packed, values_of
from tests.fixtures.kernel_engine import host_engine, kernel_engine
from tests.fixtures.random_gguf import write_random
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy_engine import drain
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, needs_triton

pytestmark = needs_triton
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
# Two int8 terms hold 15 bits of a block's largest activation; by floats nothing is rounded. Of many rows
# activations and weights become bfloat16.
FEW, MANY = 5e-5, 1e-2
ALL = sorted(PACKED_FORMATS)


def made(
    name: str, rows: int, cols: int, rng: np.random.Generator
) -> tuple[PackedTensor, torch.Tensor]:
    """A matrix as the GPU keeps it, and its values in float64."""
    stored = random_packed(name, rows, cols, rng)
    return to_packed(stored, DEVICE), torch.from_numpy(values_of(stored)).double()


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(DEVICE)


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.cpu().double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", ALL)
def test_products_of_few_and_of_many_rows(name: str):
    rng = np.random.default_rng(1)
    w, values = made(name, 21, 256, rng)
    bias = normal(rng, 21)
    for rows, tolerance in ((3, FEW), (17, MANY)):
        x, residual = normal(rng, rows, 256), normal(rng, rows, 21)
        want = x.cpu().double() @ values.T + bias.cpu().double() + residual.cpu().double()
        assert error(OPS.linear(x, w, bias, residual), want) < tolerance


@pytest.mark.parametrize("cols", [768, 320])
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k", "q4_0", "q5_0"])
def test_rows_that_end_in_the_middle_of_what_is_loaded_at_once(name: str, cols: int):
    """Of the loop's trips the last one has columns for only some of its steps."""
    if name in ("q4_k", "q6_k") and cols % 256:
        pytest.skip("no whole superblocks")
    rng = np.random.default_rng(2)
    w, values = made(name, 9, cols, rng)
    x = normal(rng, 1, cols)
    assert error(OPS.linear(x, w), x.cpu().double() @ values.T) < FEW


def test_a_group_of_matrices_in_different_formats():
    """As Q4_K_M has them: values in Q6_K beside queries and keys in Q4_K."""
    rng = np.random.default_rng(3)
    kinds = (("q4_k", 40), ("iq4_nl", 8), ("q6_k", 12))
    pairs = [made(name, rows, 256, rng) for name, rows in kinds]
    x, bias = normal(rng, 3, 256), normal(rng, 8)
    found = OPS.linear_group(x, [w for w, _ in pairs], (None, bias, None))
    for y, (_, values), b in zip(found, pairs, (None, bias, None), strict=True):
        want = x.cpu().double() @ values.T
        assert error(y, want if b is None else want + b.cpu().double()) < FEW


@pytest.mark.parametrize("kinds", [("q4_k", "q4_k"), ("q8_0", "q4_1"), ("mxfp4", "q6_k")])
@pytest.mark.parametrize("act", [Activation(), Activation("swiglu_clamped")])
def test_gated_products(kinds: tuple[str, str], act: Activation):
    rng = np.random.default_rng(4)
    (gate, g), (up, u) = (made(name, 20, 256, rng) for name in kinds)
    x = normal(rng, 1, 256)
    x /= float(max((x.cpu().double() @ m.T).abs().max() for m in (g, u)))  # values of at most 1
    left, right = x.cpu().double() @ g.T, x.cpu().double() @ u.T
    if act.kind == "silu":
        want = left * torch.sigmoid(left) * right
    else:
        left, right = left.clamp(max=act.limit), right.clamp(-act.limit, act.limit)
        want = left * torch.sigmoid(act.alpha * left) * (right + 1)
    assert error(OPS.gated_linear(x, gate, up, act), want) < 2 * FEW


@pytest.mark.parametrize("name", ALL)
def test_embedding_is_exact(name: str):
    w, values = made(name, 30, 256, np.random.default_rng(5))
    ids = torch.tensor([29, 0, 7, 7, 12], device=DEVICE)
    assert torch.equal(OPS.embed(w, ids).cpu().double(), values[ids.cpu()])


def test_a_matrix_is_expanded_in_bands(monkeypatch: pytest.MonkeyPatch):
    """Three bands of at most 10 rows: 5,120 bytes of bfloat16 each."""
    from headrace.ops.triton import packed_many

    monkeypatch.setattr(packed_many, "EXPAND_NBYTES", 10 * 256 * 2)
    rng = np.random.default_rng(6)
    w, values = made("q6_k", 25, 256, rng)
    assert [band.rows for band in packed_many.bands(w)] == [10, 10, 5]
    x = normal(rng, 20, 256)
    assert error(OPS.linear(x, w), x.cpu().double() @ values.T) < MANY


def needs_gpu(test):
    test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test)
    return pytest.mark.gpu(test)


@needs_gpu
@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "iq4_xs", "q4_1"])
def test_a_row_alone_gives_the_same_bits(name: str):
    """In launches of one, two and four activations at a time; with few rows, rows are split."""
    rng = np.random.default_rng(7)
    w, _ = made(name, 1500, 1024, rng)
    x, residual = normal(rng, 16, 1024), normal(rng, 16, 1500)

    def work(a: int, b: int) -> tuple[torch.Tensor, ...]:
        gated = (OPS.gated_linear(x[a:b], w, w, Activation()),) if name == "q4_k" else ()
        return OPS.linear(x[a:b], w, None, residual[a:b]), *gated

    together = work(0, 16)
    for count in (1, 2, 3, 5, 15):
        for first in range(0, 16 - count + 1, count):
            for part, whole in zip(work(first, first + count), together, strict=True):
                assert torch.equal(part, whole[first : first + count]), (count, first)


@needs_gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        (("q4_k", "q4_k", "q6_k"), ("q4_k", "q4_k", "q4_k")),
        (("q5_k", "q5_k", "q8_0"), ("q4_0", "q4_0", "q5_0")),
    ],
)
def test_a_model_of_mixed_blocks_gives_the_tokens_of_the_host(
    kinds: tuple[tuple[str, str, str], ...], graphs: bool, tmp_path: Path
):
    """Prompts after which the host's choices are clear, by a factor of 1.5 at least."""
    path = write_random(tmp_path / "model.gguf", kinds, seed=2)
    prompts = [[(i * 31 + j * 17) % 250 + 3 for j in range(5 + i % 20)] for i in range(24)]
    expected = answered(host_engine(path), prompts)
    clear = [i for i, (_, lead) in enumerate(expected) if lead > 0.4]
    assert len(clear) >= 3
    engine = kernel_engine(path, graphs=graphs, dense_format="packed")
    weights = [w for kind, w in engine._decoder.matrices() if "expert" not in kind]
    assert any("codes" in w.parts or "blocks" in w.parts for w in weights)
    found = answered(engine, [prompts[i] for i in clear])
    assert [tokens for tokens, _ in found] == [expected[i][0] for i in clear]


def answered(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], float]]:
    """The greedy tokens after each prompt, and the least lead of a first over a second choice."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
    found = []
    for prompt in prompts:
        engine.submit(GenerationRequest("r", tuple(prompt), params))
        done = drain(engine)
        assert not done.failed
        one = done[("r", 0)]
        tops = [delta.logprobs[0].top for delta in one.deltas if delta.logprobs]
        leads = [top[0][1] - top[1][1] for top in tops]
        found.append((list(one.token_ids), min(leads)))
    return found
