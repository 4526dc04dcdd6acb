"""The probe of the kernels: every rate that a dense model's prediction takes, and plain numbers."""

from dataclasses import replace

import pytest
import torch

from headrace.core.numeric import FORMATS
from headrace.engine.kernel_probe import class_probes
from headrace.engine.stand_in import packed
from headrace.explain import leaf
from headrace.explain.running_cost import Stored
from headrace.formats.base import check_parts, dequantize
from headrace.ops import registry
from tests.fixtures.running_models import dense_model


def test_each_class_of_a_dense_model_is_probed_with_its_shapes():
    model = dense_model()
    shapes = {
        "q": (8, 8),
        "k": (4, 8),
        "v": (4, 8),
        "o": (8, 8),
        "lm_head": (10, 8),
        "embed": (10, 8),
    }
    shapes |= {"gate": (16, 8), "up": (16, 8), "down": (8, 16)}
    matrices = {
        kind: Stored(2, 2 * rows * cols, 8 * rows * cols, "f32", rows, cols)
        for kind, (rows, cols) in shapes.items()
    }
    probes = class_probes(registry.resolve(("reference",)), replace(model, matrices=matrices))
    assert set(probes) == {leaf.QKV, leaf.O_PROJECTION, leaf.DENSE_FFN, leaf.LM_HEAD}
    assert probes[leaf.DENSE_FFN].elements == 3 * 128
    assert probes[leaf.QKV].elements == 128
    assert probes[leaf.DENSE_FFN].gflops() > 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_synthetic_matrices_are_written_and_finite(name: str):
    weight = packed(name, 128, 256)
    check_parts(weight)
    values = dequantize(weight)
    assert values.shape == (128, 256)
    assert torch.isfinite(values).all()
