"""What computes the experts can be replaced; what it is given."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.layers.moe import InMemoryExperts
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.records import Activation
from headrace.ops.registry import resolve
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.tiny_models import make_model, prompt, save_model


class Recorder:
    """Passes calls on and remembers which mixture they were for."""

    def __init__(self, spec, experts, ops):
        self.spec = spec
        self.experts = experts
        self.layers = []
        act = Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit)
        self._inner = InMemoryExperts(ops, experts, act)

    def __call__(self, layer, x, ids, weights):
        self.layers.append(layer)
        return self._inner(layer, x, ids, weights)


def test_the_factory_gets_the_experts_of_every_mixture_and_serves_all_of_them(tmp_path: Path):
    """The first layer of this model is dense: mixtures are counted without it."""
    checkpoint = open_checkpoint(str(save_model(make_model("qwen3_moe"), tmp_path)))
    ops, made = resolve(("reference",)), []

    def factory(spec, experts):
        made.append(Recorder(spec, experts, ops))
        return made[0]

    logits = []
    for executor_factory in (None, factory):
        decoder = load_model(
            checkpoint, ops, HostDevice(), max_positions=64, executor_factory=executor_factory
        )
        pages = Pages(decoder.spec)
        batch = pages.batch([(pages.sequence(), 12)])
        logits.append(decoder.logits(decoder.forward(torch.tensor(prompt(12)), batch, pages.kv)))
    assert torch.equal(*logits)
    recorder = made[0]
    assert recorder.spec == checkpoint.spec
    assert recorder.layers == [0, 1]
    assert len(recorder.experts) == 2
    raw = checkpoint.tensors["layers.2.experts.3.down"].parts["data"]
    down = recorder.experts[1].down[3].parts["data"]
    assert down.data_ptr() == raw.ctypes.data  # left where it is mapped
