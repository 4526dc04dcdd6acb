"""Logits of every architecture against transformers' float32 (eager attention).

The bound: 1e-5 of the largest |logit|. Both sides compute in float32 in different orders; sums of
64 to 96 products err by about sqrt(96) * 2^-24 = 6e-7 each, and 2 to 4 layers with some ten sums
one after the other amplify that (seen: 4e-7 to 1.3e-6). A wrong pairing, mask, scale or expert is
off by more than 1e-2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint
from headrace.machine.device import HostDevice
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops.registry import resolve, unavailable_reason
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.tiny_gguf import write_gguf
from tests.fixtures.tiny_models import (
    CONFIGS,
    WINDOW,
    expected_logits,
    make_model,
    make_mxfp4_gpt_oss,
    prompt,
    save_model,
    save_mxfp4_gpt_oss,
)

BOUND = 1e-5
LENGTH = 5 * WINDOW + 5

CPU_REASON = unavailable_reason("cpu")
BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(CPU_REASON is not None, reason=str(CPU_REASON))),
]


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(str(path))


def load(checkpoint: Checkpoint, backend: str) -> Decoder:
    names = ("reference",) if backend == "reference" else (backend, "reference")
    return load_model(checkpoint, resolve(names), HostDevice(), max_positions=128)


def check(decoder: Decoder, model: transformers.PreTrainedModel) -> None:
    """Compare one prefill, a chunked prefill, and prefill with decode beside another sequence."""
    ids, other = prompt(LENGTH), prompt(LENGTH - 9, seed=11)
    want, want_other = expected_logits(model, ids), expected_logits(model, other)
    assert want.std() > 0.5  # not flat

    def close(hidden: torch.Tensor, expected: torch.Tensor) -> None:
        got = decoder.logits(hidden)
        worst = float((got - expected).abs().max() / want.abs().max())
        assert worst <= BOUND, f"max |difference| / max |logit| = {worst:.2e}"

    pages = Pages(decoder.spec)
    whole = pages.sequence()
    close(decoder.forward(torch.tensor(ids), pages.batch([(whole, LENGTH)]), pages.kv), want)

    pages = Pages(decoder.spec)
    chunked = pages.sequence()
    for count in (3, 1, WINDOW + 9, LENGTH - WINDOW - 13):
        start = chunked.length
        batch = pages.batch([(chunked, count)])
        hidden = decoder.forward(torch.tensor(ids[start : start + count]), batch, pages.kv)
        close(hidden, want[start : start + count])

    pages = Pages(decoder.spec)
    first, second = pages.sequence(), pages.sequence()
    half = 28  # decoding crosses from the second block into the third
    batch = pages.batch([(first, half), (second, 2)])
    hidden = decoder.forward(torch.tensor(ids[:half] + other[:2]), batch, pages.kv)
    close(hidden, torch.cat((want[:half], want_other[:2])))
    for step in range(8):
        tokens = torch.tensor([ids[half + step], other[2 + step]])
        batch = pages.batch([(first, 1), (second, 1)], decode=True)
        hidden = decoder.forward(tokens, batch, pages.kv)
        close(hidden, torch.stack((want[half + step], want_other[2 + step])))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt_oss-published"])
def test_safetensors_match_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = make_model(name)
    check(load(opened(save_model(model, tmp_path)), backend), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt_oss_mxfp4_safetensors(backend: str, tmp_path: Path) -> None:
    model, stored = make_mxfp4_gpt_oss()
    check(load(opened(save_mxfp4_gpt_oss(model, stored, tmp_path)), backend), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt_oss_mxfp4_gguf(backend: str, tmp_path: Path) -> None:
    model, stored = make_mxfp4_gpt_oss()
    path = write_gguf(model, "gpt-oss", tmp_path / "oss.gguf", stored=stored)
    check(load(opened(path), backend), model)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("qwen3-yarn", "qwen3"),
        ("olmoe", "olmoe"),
        ("mixtral", "llama"),
        ("qwen3_moe-sparse", "qwen3moe"),
        ("gemma3-published", "gemma3"),
    ],
)
def test_gguf_matches_transformers(
    name: str, architecture: str, backend: str, tmp_path: Path
) -> None:
    model = make_model(name)
    check(load(opened(write_gguf(model, architecture, tmp_path / "m.gguf")), backend), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf_tied_with_rope_freqs(backend: str, tmp_path: Path) -> None:
    """Llama 3's scaling reaches GGUF as divisors of the frequencies, and no output matrix."""
    model = make_model("llama-tied-llama3")
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    scaled = model.model.rotary_emb.inv_freq.numpy().astype(np.float64)
    path = write_gguf(model, "llama", tmp_path / "m.gguf", rope_freqs=plain / scaled)
    decoder = load(opened(path), backend)
    assert decoder.spec.tie_embeddings
    check(decoder, model)


def test_observer_sees_every_mixture(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    decoder = load(opened(save_model(model, tmp_path)), "reference")
    seen: list[tuple[int, torch.Tensor]] = []
    decoder.on_routing = lambda layer, ids: seen.append((layer, ids.clone()))
    pages = Pages(decoder.spec)
    ids = prompt(12)
    batch = pages.batch([(pages.sequence(), 12)])
    decoder.forward(torch.tensor(ids), batch, pages.kv)
    assert [layer for layer, _ in seen] == [1, 2]  # layer 0 is dense
    with torch.no_grad():
        outputs = model(torch.tensor([ids]), output_router_logits=True)
    for (_, chosen), logits in zip(seen, outputs.router_logits):
        want = torch.topk(logits, 2, dim=-1).indices
        assert torch.equal(chosen.long(), want)
    decoder.on_routing = None
    decoder.forward(torch.tensor([1]), pages.batch([(pages.sequence(), 1)]), pages.kv)
    assert len(seen) == 2
