"""Marks between the kernels of replayed steps: what they count, and that nothing is left behind.

On the host, whose graphs run the same work again; marks take its clock.
"""

from __future__ import annotations

import numpy as np
import pytest

import headrace.engine.gpu_profiler as gpu_profiler
from headrace.checkpoint.open import open_checkpoint
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.status import EngineInfo
from headrace.core.step import StepStats
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.engine import Engine
from headrace.engine.explaining import Watch
from headrace.engine.gpu_profiler import GpuStepProfiler
from headrace.engine.parts import EngineParts
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.explain import leaf
from headrace.kv.storage import allocate_kv
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.registry import BLOCKS, OpSet, resolve
from headrace.text.tokenizer import load_tokenizer
from tests.fixtures.host_marks import HostMarks
from tests.fixtures.late_device import InOrder, LateDevice

STEPS, CONTEXT, BLOCK_TOKENS = 10, 64, 16


def watched(monkeypatch: pytest.MonkeyPatch, graphs: bool, device: HostDevice | None = None):
    """The embedded model, operation by operation, and its profiler."""
    device, checkpoint = device or HostDevice(), open_checkpoint("tiny")
    chosen = resolve(("reference",)).chosen
    ops = OpSet({name: op for name, op in chosen.items() if name not in BLOCKS})
    decoder = load_model(checkpoint, ops, device, max_positions=CONTEXT)
    blocks = CONTEXT // BLOCK_TOKENS
    kv = allocate_kv(checkpoint.spec, blocks + 1, BLOCK_TOKENS, "f32", device.torch_device)
    captured = None
    if graphs:
        captured = DecodeGraphs(decoder, kv, device, max_batch=1, context=CONTEXT)
        captured.capture()
    info = EngineInfo(
        "tiny", "llama", CONTEXT, decoder.spec.vocab, 0, 0, "f32", BLOCK_TOKENS, 1, {}, (), 0.0
    )
    limits = SchedulerConfig(blocks, BLOCK_TOKENS, CONTEXT, CONTEXT, 1, prefix_cache=False)
    tokenizer = load_tokenizer(checkpoint.text)
    served = InOrder(decoder, device) if isinstance(device, LateDevice) else decoder
    engine = Engine(EngineParts(served, kv, tokenizer, limits, info, device, captured))
    profiler = GpuStepProfiler(decoder, "f32", BLOCK_TOKENS, HostMarks(), captured, device=device)
    monkeypatch.setattr("headrace.engine.engine.make_profiler", lambda _: profiler)
    return engine, profiler


def run(engine, most: list[int] | None = None) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.submit(GenerationRequest("one", (1, 2, 3), sampling))
    ids: list[int] = []
    while engine.has_work():
        for item in engine.step():
            ids += item.token_ids
        if most is not None:
            most.append(len(engine._flights))
    return ids


def test_one_replayed_step_is_marked_and_all_give_the_same_tokens(monkeypatch):
    engine, profiler = watched(monkeypatch, graphs=True)
    plain = run(engine)
    watch = Watch(engine)
    watch.start()
    assert run(engine) == plain
    watch.stop()
    decode = [one for one in watch.steps if one.stats.phase == "decode"]
    assert [one.slowed for one in decode] == [i == gpu_profiler.FIRST for i in range(STEPS - 1)]
    layers = profiler.model.spec.num_layers
    marked: StepStats = decode[gpu_profiler.FIRST].stats
    calls = {c.id: c.calls for c in marked.classes}
    assert calls[leaf.QKV] == calls[leaf.ATTENTION_DECODE] == layers
    assert calls[leaf.RMSNORM] == 2 * layers + 1
    assert calls[leaf.LM_HEAD] == calls[leaf.SAMPLING] == calls[leaf.EMBED] == 1
    gpu = (leaf.QKV, leaf.LM_HEAD, leaf.RMSNORM)
    assert all(c.seconds > 0 for c in marked.classes if c.id in gpu)
    # What is not marked says what the host did, and now and then what starting the graph took.
    host = {leaf.SCHEDULE, leaf.DETOKENIZE}
    brackets = [0, gpu_profiler.FIRST_BRACKET]  # the step that records them is one, too
    for index, one in enumerate(decode):
        if index != gpu_profiler.FIRST:
            seen = {c.id for c in one.stats.classes}
            assert seen == host | ({leaf.LAUNCHES} if index in brackets else set())
    # Marked kernels and the host's part of the step fill it.
    assert sum(c.seconds for c in marked.classes) <= marked.seconds
    sample = watch.sample("decode")
    assert sample is not None
    assert len(sample.slowed) == 1
    assert len(sample.stats) == STEPS - 1 - 2 - 1


def test_watched_steps_run_ahead(monkeypatch):
    """Marks come with their step, and the host's classes have what the device did not hide."""
    monkeypatch.setattr(gpu_profiler, "BRACKETS", 4)
    monkeypatch.setattr(gpu_profiler, "FIRST_BRACKET", 3)
    engine, profiler = watched(monkeypatch, True, LateDevice())
    plain = run(engine)
    recordings = dict(engine.parts.graphs._graphs)
    watch, flying = Watch(engine), list[int]()
    watch.start()
    assert run(engine, flying) == plain
    assert flying == [0, *[1] * (STEPS - 2), 0]
    decode = [one for one in watch.steps if one.stats.phase == "decode"]
    assert [one.slowed for one in decode] == [i == gpu_profiler.FIRST for i in range(STEPS - 1)]
    layers = profiler.model.spec.num_layers
    marked: StepStats = decode[gpu_profiler.FIRST].stats
    calls = {c.id: c.calls for c in marked.classes}
    assert calls[leaf.QKV] == calls[leaf.ATTENTION_DECODE] == layers
    assert calls[leaf.LM_HEAD] == calls[leaf.SAMPLING] == calls[leaf.EMBED] == 1
    for one in decode:
        seconds = {c.id: c.seconds for c in one.stats.classes}
        assert seconds.keys() >= {leaf.SCHEDULE, leaf.DETOKENIZE, leaf.LAUNCHES}
        assert sum(seconds.values()) <= one.stats.seconds
    watch.stop()
    assert engine.parts.graphs._graphs == recordings
    assert run(engine) == plain


def test_what_the_host_does_counts_as_far_as_the_device_waited():
    """300 us of the host, 100 of them beyond the GPU's work: a third of each; and all of it, and 50 more."""
    host = {"schedule": 100e-6, "decoder": 150e-6, "text": 50e-6}
    found = GpuStepProfiler._exposed(host, 100e-6)
    assert found == pytest.approx({"schedule": 1e-4 / 3, "decoder": 5e-5, "text": 5e-5 / 3})
    assert GpuStepProfiler._exposed(host, 0.0) == dict.fromkeys(host, 0.0)
    found = GpuStepProfiler._exposed(host, 350e-6)
    assert found == pytest.approx({"schedule": 100e-6, "decoder": 200e-6, "text": 50e-6})


def test_classes_share_what_brackets_measure(monkeypatch):
    """Marks of 1 us each around 4, 2 and 6 us that overlap to 10 without them. What they cost, 2/3 us (the
    whole difference to the bracket), leaves 10/3, 4/3 and 16/3, which fit the bracket; at most 2.5 times
    0.1 us, 3.75, 1.75 and 5.75 are too much by an eighth."""
    _, profiler = watched(monkeypatch, graphs=True)
    found = gpu_profiler._Recorded(
        None, ["a", "b"], np.array([0, 1, 0]), None, [9e-6, 10e-6, 12e-6]
    )
    for mark_s, first, second in ((1e-6, 26 / 3, 4 / 3), (0.1e-6, 9.5 * 8 / 9, 1.75 * 8 / 9)):
        profiler._mark_s = mark_s
        profiler._add_marked(np.array([4e-6, 2e-6, 6e-6]), found)
        seen = {name: (calls, s * 1e6) for name, (calls, s) in profiler.classes().items()}
        assert seen["a"] == (2, pytest.approx(first))
        assert seen["b"] == (1, pytest.approx(second))


def test_launched_steps_are_all_marked(monkeypatch):
    engine, profiler = watched(monkeypatch, graphs=False)
    watch = Watch(engine)
    watch.start()
    run(engine)
    watch.stop()
    layers = profiler.model.spec.num_layers
    for one in watch.steps:
        calls = {c.id: c.calls for c in one.stats.classes}
        name = leaf.ATTENTION_DECODE if one.stats.phase == "decode" else leaf.ATTENTION_PREFILL
        assert calls[name] == layers
        assert not one.slowed


def test_nothing_is_left_behind(monkeypatch):
    engine, profiler = watched(monkeypatch, graphs=True)
    before = {name: getattr(profiler.ops, name) for name in profiler.ops.chosen}
    recordings = dict(engine.parts.graphs._graphs)
    watch = Watch(engine)
    watch.start()
    run(engine)
    watch.stop()
    assert {name: getattr(profiler.ops, name) for name in profiler.ops.chosen} == before
    assert engine.parts.graphs._graphs == recordings
