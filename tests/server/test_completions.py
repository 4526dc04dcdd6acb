"""``/v1/completions``: prompt shapes, echo, log-probabilities, several prompts and choices."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.request import GenerationRequest, OutputDelta
from tests.fixtures.scripted import BOS, Wait, say, toy_logprob, toy_logprobs

from .conftest import Served


def parrot(request: GenerationRequest) -> list[Any]:
    """Each sequence repeats the prompt's last byte in capitals, once per sequence number."""
    letter = chr(request.prompt_token_ids[-1]).upper()
    n = request.sampling.n
    out: list[Any] = []
    for i in range(n):
        out += say(request, [letter] * (i + 1), index=i, usage=i == n - 1)
    return out


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["a", "b"], [(BOS, 97), (BOS, 98)]),
        ([97, 98, 99], [(97, 98, 99)]),
        ([[97], [98]], [(97,), (98,)]),
    ],
)
def test_b152_prompt_shapes(served: Served, prompt: Any, expected: Any):
    served.script(parrot)
    reply = served.openai.completions.create(model="toy", prompt=prompt)
    assert sorted(r.prompt_token_ids for r in served.engine.requests) == sorted(expected)
    assert [c.index for c in reply.choices] == list(range(len(expected)))
    assert [c.text for c in reply.choices] == [chr(e[-1]).upper() for e in expected]
    assert reply.object == "text_completion"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(len(e) for e in expected)


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], ["a", 1], {"a": 1}, None, 5, [True], [-1], [258], [[1], "a"], [[[1]]], [1.0]],
)
def test_b152_other_shapes_are_400(served: Served, prompt: Any):
    response = served.complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == "prompt"
    assert served.engine.requests == []


def test_prompts_and_choices_are_numbered_together(served: Served):
    served.script(parrot)
    reply = served.complete(prompt=["a", "b"], n=2).json()
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [
        (0, "A"),
        (1, "AA"),
        (2, "B"),
        (3, "BB"),
    ]
    assert reply["usage"]["completion_tokens"] == 4  # of the last sequence of each, as scripted


def test_streamed_prompts_and_choices(served: Served):
    def slow_first(request: GenerationRequest) -> list[Any]:
        pause = [Wait(0.05)] if request.prompt_token_ids[-1] == ord("a") else []
        return [*pause, *parrot(request)]

    served.script(slow_first)
    chunks = served.chunks(
        "/v1/completions", prompt=["a", "b"], n=2, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"] is not None:
            reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert texts == {0: "A", 1: "AA", 2: "B", 3: "BB"}
    assert reasons == {i: ["stop"] for i in range(4)}
    assert chunks[0]["choices"][0]["index"] == 2  # prompts do not wait for one another
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 4


def test_openai_client_streams(served: Served):
    served.script(lambda r: say(r, ["one ", "two"]))
    chunks = list(served.openai.completions.create(model="toy", prompt="x", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "one two"
    assert chunks[-1].choices[0].finish_reason == "stop"


def with_prompt_logprobs(request: GenerationRequest) -> list[Any]:
    ids = request.prompt_token_ids
    entries = (None, *toy_logprobs(ids[1:], request.sampling.prompt_logprobs))
    first, *rest = say(request, ["é", "!"])
    return [
        OutputDelta(first.request_id, 0, first.text, first.token_ids, first.logprobs, entries),
        *rest,
    ]


def test_echo_with_logprobs_as_lm_eval_reads_them(served: Served):
    served.script(with_prompt_logprobs)
    ids = [ord("x"), ord("y")]
    choice = served.complete(prompt=[ids], echo=True, logprobs=1, max_tokens=2).json()["choices"][0]
    assert served.engine.requests[0].sampling.prompt_logprobs == 1
    assert choice["text"] == "xyé!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "bytes:\\xc3", "bytes:\\xa9", "!"]
    # Both bytes belong to the third character; the mark after them is the fourth.
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3]
    generated = [toy_logprob(i) for i in (0xC3, 0xA9, ord("!"))]
    assert logprobs["token_logprobs"] == [None, toy_logprob(ord("y")), *generated]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"y": toy_logprob(ord("y"))}
    # Scripted: alternatives are (id + k) % 128, so byte 0xC3's best one is another token ("C").
    assert logprobs["top_logprobs"][2]["bytes:\\xc3"] == toy_logprob(0xC3)


def test_streamed_echo_equals_plain(served: Served):
    served.script(with_prompt_logprobs)
    body = {"prompt": [[120, 121]], "echo": True, "logprobs": 1}
    plain = served.complete(**body).json()["choices"][0]
    chunks = served.chunks("/v1/completions", **body)
    joined: dict[str, list[Any]] = {k: [] for k in plain["logprobs"]}
    for chunk in chunks:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[key] += values
    assert joined == plain["logprobs"]
    assert "".join(c["choices"][0]["text"] for c in chunks) == plain["text"]


def test_echo_waits_for_the_prompts_logprobs(served: Served):
    """Sequence 1 may speak before sequence 0, whose first delta brings the prompt's values."""

    def script(request: GenerationRequest) -> list[Any]:
        return [*say(request, ["z"], index=1, usage=False), *with_prompt_logprobs(request)]

    served.script(script)
    choices = served.complete(prompt=[[120, 121]], echo=True, logprobs=0, n=2).json()["choices"]
    assert [c["text"] for c in choices] == ["xyé!", "xyz"]
    assert choices[1]["logprobs"]["token_logprobs"] == [
        None,
        toy_logprob(ord("y")),
        toy_logprob(ord("z")),
    ]
    assert choices[1]["logprobs"]["top_logprobs"] is None


def test_echo_without_logprobs(served: Served):
    assert served.complete(prompt="say ", echo=True).json()["choices"][0]["text"] == "say ok"


def test_chosen_token_is_among_its_alternatives(served: Served):
    """OpenAI adds the sampled token when it is not one of the best."""

    def script(request: GenerationRequest) -> list[Any]:
        (d,) = say(request, ["\u00e9"])
        return [d]

    served.script(script)
    top = served.complete(logprobs=2).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(t) for t in top] == [3, 3]


def test_a_failed_prompt_ends_the_others(served: Served):
    from headrace.core.errors import DoesNotFitError
    from tests.fixtures.http_server import wait_until
    from tests.fixtures.scripted import Fail, Stall

    def script(request: GenerationRequest) -> list[Any]:
        bad = request.prompt_token_ids[-1] == ord("b")
        return [Fail(DoesNotFitError("no memory"))] if bad else [Stall()]

    served.script(script)
    response = served.complete(prompt=["a", "b", "c"])
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "out_of_memory"
    wait_until(lambda: not served.engine.open)
    assert len(served.engine.cancelled) == 2


def test_best_of_must_equal_n(served: Served):
    assert served.complete(best_of=1).status_code == 200
    response = served.complete(best_of=3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"
