"""Rounding, export and reading back; the exported toy in transformers and in our decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from headrace.checkpoint.open import open_checkpoint
from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, OutputDelta, SamplingParams
from headrace.engine.engine import Engine
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.registry import resolve
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.tiny_models import quiet
from training.evaluate import Routes, routes_of
from training.export import export, quantise_mxfp4
from training.load import dequantise_mxfp4, load_exported
from training.model import SHAPES, MixtureModel, fake_mxfp4

# Two float32 forwards in different orders (seen: 4e-7); see tests/parity/test_models_logits.py.
BOUND = 1e-5


def reference(folder: Path) -> transformers.PreTrainedModel:
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with spread weights, so that its logits are not flat."""
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(5)
    model = MixtureModel(SHAPES["toy"])
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "bias" in name or "sinks" in name:
                value.normal_(std=0.3)
            elif "proj" in name or "router" in name:
                value.normal_(std=0.15)
        model.embed.weight.normal_(std=0.3)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    export(model, folder / "tokenizer.json", folder / "model")
    return folder / "model"


def test_mxfp4_by_hand() -> None:
    """Peak 5: exponent 2, scale 1. 5 ties to even 4; 1.25 to 1.0; 0.75 to 1.0; 3.5 to 4; -0.3."""
    block = torch.zeros(1, 1, 32)
    block[0, 0, :6] = torch.tensor([5.0, 1.25, 0.75, 3.5, -0.3, 7.0])
    want = torch.zeros(1, 1, 32)
    want[0, 0, :6] = torch.tensor([4.0, 1.0, 1.0, 4.0, -0.5, 6.0])
    assert torch.equal(fake_mxfp4(block), want)
    codes, scales = quantise_mxfp4(block)
    assert scales.tolist() == [[[127]]]
    # E2M1 codes: 1.0 is 2, 4.0 is 6, -0.5 is 9, 6.0 is 7; the even element in the low nibble
    assert codes[0, 0, 0, :3].tolist() == [6 | 2 << 4, 2 | 6 << 4, 9 | 7 << 4]


def test_training_sees_what_is_stored() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 64) * torch.logspace(-6, 3, 8)[:, None]
    weight[0, 0] = 0.0
    stored = dequantise_mxfp4(*quantise_mxfp4(weight))
    # weight + (rounded - weight) can miss the rounded value by half a unit in the last place
    torch.testing.assert_close(fake_mxfp4(weight), stored, rtol=2e-7, atol=0)
    assert torch.equal(dequantise_mxfp4(*quantise_mxfp4(stored)), stored)


def test_rounding_passes_gradients_and_can_be_off() -> None:
    weight = torch.randn(1, 2, 32, requires_grad=True)
    fake_mxfp4(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(1, 2, 32))
    assert torch.equal(fake_mxfp4(weight, 0.0), weight)


def test_exported_toy_in_transformers_and_in_our_decoder(exported: Path) -> None:
    ids = torch.randint(0, 512, (1, 45), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = reference(exported)(ids).logits[0]
        ours = load_exported(exported)
        got = ours(ids, (None, None))[0][0] @ ours.embed.weight.T
    assert float(want.std()) > 0.5
    assert float((got - want).abs().max() / want.abs().max()) < BOUND
    decoder = load_model(open_checkpoint(str(exported)), resolve(("reference",)), HostDevice())
    pages = Pages(decoder.spec)
    batch = pages.batch([(pages.sequence(), 45)])
    served = decoder.logits(decoder.forward(ids[0], batch, pages.kv))
    assert float((served - want).abs().max() / want.abs().max()) < BOUND


def test_recorded_routes_equal_the_decoders(exported: Path) -> None:
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    model = load_exported(exported)
    found = routes_of(model, Routes(model), [ids])
    decoder = load_model(open_checkpoint(str(exported)), resolve(("reference",)), HostDevice())
    seen: dict[int, torch.Tensor] = {}
    decoder.on_routing = lambda layer, chosen: seen.update({layer: chosen.clone()})
    pages = Pages(decoder.spec)
    decoder.forward(torch.tensor(ids), pages.batch([(pages.sequence(), 40)]), pages.kv)
    assert found.shape == (2, 40, 2)
    for layer in range(2):
        assert found[layer].tolist() == seen[layer].tolist()


def test_the_shipped_model_writes_what_transformers_writes() -> None:
    """Greedy tokens of ``tiny``, loaded by name, and its tokenizer's text."""
    folder = open_checkpoint("tiny").path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The following example shows how to", return_tensors="pt").input_ids
    model = reference(folder)
    with torch.no_grad():
        whole = model.generate(
            prompt, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(prompt)
        )
    want = whole[0, prompt.shape[1] :].tolist()
    engine = Engine.load(EngineConfig("tiny", threads=1, backend="reference", device="cpu"))
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    engine.submit(GenerationRequest("a", tuple(prompt[0].tolist()), sampling))
    ids: list[int] = []
    text = ""
    while engine.has_work():
        for item in engine.step():
            assert isinstance(item, OutputDelta)
            ids += item.token_ids
            text += item.text
    engine.close()
    assert ids == want
    assert text == tokenizer.decode(want)
