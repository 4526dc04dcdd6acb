"""The layers that steps are timed on beforehand, and that predictions find every rate of them."""

from dataclasses import replace

import pytest

import headrace.engine.step_probe as probing
from headrace.core.config import EngineConfig
from headrace.core.kv_formats import FORMATS
from headrace.core.model_spec import LayerSpec
from headrace.engine.engine import Engine
from headrace.engine.profiler import running_model
from headrace.engine.stand_in import stand_in
from headrace.engine.step_probe import layers_to_time, middle_step, probe_steps
from headrace.explain import leaf
from headrace.explain.kernel_rates import predict
from headrace.explain.running_cost import RunningModel, Stored, decode_rows
from headrace.ops.registry import OpSet, resolve
from tests.fixtures.running_models import dense_model, machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STEPS", 4), ("WARM_UP", 1), ("COLD_NBYTES", 1), ("CONTEXTS", (32, 64))):
        monkeypatch.setattr(probing, name, value)


def loaded(backend: str) -> tuple[RunningModel, OpSet]:
    engine = Engine.load(EngineConfig("tiny", context=64, device="cpu", threads=2, backend=backend))
    profiler = engine.watch_classes(True)
    engine.watch_classes(False)
    engine.close()
    assert profiler is not None
    return profiler.model, profiler.ops


def test_a_stand_in_has_the_shapes_and_formats_of_the_model():
    model, ops = loaded("reference")
    decoder = stand_in(model, ops, 3, 32)
    mine = running_model(decoder, model.kv_format, model.block_tokens)
    assert mine.spec.num_layers == 3
    assert set(mine.matrices) == set(model.matrices)
    for kind, stored in mine.matrices.items():
        whole = model.matrices[kind]
        assert (stored.format, stored.rows, stored.cols) == (whole.format, whole.rows, whole.cols)
        assert stored.nbytes / stored.count == whole.nbytes / whole.count
    # As many experts as a token takes are apart, so that a step reads what the model's would.
    experts = [w for kind, w in decoder.matrices() if kind == "expert"]
    own = {next(iter(w.parts.values())).data_ptr() for w in experts}
    assert model.spec.moe is not None
    assert len(own) == 3 * 3 * model.spec.moe.num_experts_per_token


def test_windows_and_post_norms_do_not_stop_a_stand_in():
    model = dense_model((4, None))
    shapes = {
        "q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (16, 8), "up": (16, 8),
        "down": (8, 16), "embed": (10, 8), "lm_head": (10, 8),
    }  # fmt: skip
    matrices = {
        kind: Stored(2, 2 * r * c, 8 * r * c, "f32", r, c) for kind, (r, c) in shapes.items()
    }
    spec = replace(model.spec, post_norms=True, qk_norm="head", qkv_bias=True, sinks=True)
    decoder = stand_in(replace(model, spec=spec, matrices=matrices), resolve(("reference",)), 2, 8)
    assert decoder.spec.layers == (LayerSpec(None, False),) * 2


def test_as_few_layers_are_timed_as_read_more_than_caches_hold():
    model = dense_model((None,) * 40)
    mib = 1 << 20
    layer = {"q": Stored(40, 1, 40 * mib, "f32"), "gate": Stored(40, 1, 40 * mib, "f32")}
    head = {kind: Stored(1, 1, 16 * mib, "f32") for kind in ("embed", "lm_head")}
    # 96 MiB less the head's 16 are 40 layers of 2 MiB; of layers ten times as large 4; 2 at least.
    assert layers_to_time(replace(model, matrices=layer | head)) == 40
    tenfold = {kind: replace(one, nbytes=10 * one.nbytes) for kind, one in layer.items()}
    assert layers_to_time(replace(model, matrices=tenfold | head)) == 4
    large = {kind: replace(one, nbytes=100 * one.nbytes) for kind, one in layer.items()}
    assert layers_to_time(replace(model, matrices=large | head)) == 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_is_predicted_from_what_is_probed(backend: str, quick: None):
    model, ops = loaded(backend)
    rates = probe_steps(ops, model)
    assert all(rate.value > 0 for rate in rates.values())
    many = {name.replace("one", "many"): (1e6, "GFLOP/s") for name in rates if "_one_" in name}
    on = machine(**many)
    found = predict(model, decode_rows(1, 50), replace(on, rates={**on.rates, **rates}))
    assert found.classes[leaf.LAUNCHES] == model.spec.num_layers * rates["layer_calls"].value
    assert found.classes[leaf.EXPERTS_GPU] > 0
    assert found.seconds > rates["step_host"].value


def test_of_a_cache_that_is_quantised_attention_is_not_predicted(quick: None):
    model, ops = loaded("reference")
    sealed = next(name for name, made in FORMATS.items() if made.sealed)
    rates = probe_steps(ops, replace(model, kv_format=sealed))
    assert "kernel_attention_decode" not in rates
    assert "layer_calls" in rates


def test_classes_of_the_middle_steps_add_up_to_the_middle_step():
    # Each class is interrupted once, the steps take 4, 3, 12, 3, 5, 30, 3, 4: the middle ones 3, 4, 4, 5.
    steps = [(2.0, 2.0), (1.0, 2.0), (2.0, 10.0), (1.0, 2.0), (4.0, 1.0), (29.0, 1.0), (2.0, 1.0)]
    steps.append((1.0, 3.0))
    found = middle_step([{"a": a, "b": b} for a, b in steps])
    assert found == {"a": (2 + 2 + 1 + 4) / 4, "b": (1 + 2 + 3 + 1) / 4}
    assert middle_step([{"a": 1.0}, {"b": 3.0}]) == {"a": 0.5, "b": 1.5}
