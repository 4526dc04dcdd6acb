"""Chat replies as one object: fields, log-probabilities, usage, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.request import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    SamplingParams,
    TokenLogprob,
)
from tests.fixtures.scripted import BOS, say, toy_logprob

from .conftest import Served


def test_openai_client_reads_a_reply(served: Served):
    served.script(lambda r: say(r, ["Hel", "lo"], cached=3))
    reply = served.openai.chat.completions.create(model="toy", messages=served.ask)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == "toy"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    prompt = 1 + len(b"user:hi;assistant:")
    assert reply.usage.prompt_tokens == prompt
    assert reply.usage.completion_tokens == 5
    assert reply.usage.total_tokens == prompt + 5
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_two_choices_keep_their_texts(served: Served):
    def two(request: GenerationRequest) -> list[Any]:
        a, b = say(request, ["a", "b"], index=0)
        c, d = say(request, ["c", "d"], index=1, usage=False)
        return [a, c, d, b]

    served.script(two)
    reply = served.openai.chat.completions.create(model="toy", messages=served.ask, n=2)
    assert [(c.index, c.message.content) for c in reply.choices] == [(0, "ab"), (1, "cd")]
    assert served.engine.requests[0].sampling.n == 2


def test_defaults_are_openais(served: Served):
    served.chat()
    assert served.engine.requests[0].sampling == SamplingParams()
    assert SamplingParams().temperature == 1.0
    assert SamplingParams().top_p == 1.0


def test_b079_every_accepted_field_reaches_the_engine(served: Served):
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 2,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"65": 5, "66": -100.0},
        "seed": 42,
        "stop": ["x", "yz"],
        "stop_token_ids": [10],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_completion_tokens": 9,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "cache_salt": "tenant",
    }
    served.script(lambda r: [d for i in range(3) for d in say(r, ["a"], index=i, usage=i == 2)])
    assert served.chat(**fields).status_code == 200
    (request,) = served.engine.requests
    assert request.cache_salt == "tenant"
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=2.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias=((65, 5.0), (66, -100.0)),
        seed=42,
        stop=("x", "yz"),
        stop_token_ids=(10,),
        include_stop=True,
        ignore_eos=True,
        max_tokens=9,
        n=3,
        logprobs=2,
    )


def test_stop_may_be_one_string(served: Served):
    served.chat(stop="END")
    assert served.engine.requests[0].sampling.stop == ("END",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_completion_tokens": None, "max_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 4}, 4),
    ],
)
def test_b083_max_tokens_null_is_absent(served: Served, fields: dict[str, Any], expected: Any):
    assert served.chat(**fields).status_code == 200
    assert served.engine.requests[0].sampling.max_tokens == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, "5", 1.5, True])
def test_b083_wrong_max_tokens_is_400_naming_the_field(served: Served, name: str, value: Any):
    response = served.chat(**{name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert served.engine.requests == []


def test_max_tokens_given_twice_must_agree(served: Served):
    response = served.chat(max_tokens=4, max_completion_tokens=5)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_completion_tokens"


def test_b086_each_token_has_its_own_alternatives(served: Served):
    served.script(lambda r: say(r, ["abc"]))
    reply = served.chat(logprobs=True, top_logprobs=2).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == ["a", "b", "c"]
    assert [e["bytes"] for e in content] == [[97], [98], [99]]
    assert [e["logprob"] for e in content] == [toy_logprob(i) for i in b"abc"]
    assert [[t["token"] for t in e["top_logprobs"]] for e in content] == [
        ["a", "b"],
        ["b", "c"],
        ["c", "d"],
    ]
    chunks = served.chunks(
        "/v1/chat/completions", messages=served.ask, logprobs=True, top_logprobs=2
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_b086_tokens_without_text_keep_their_entries(served: Served):
    """The first byte of a character has no text yet; its log-probability is there all the same."""

    def split(request: GenerationRequest) -> list[Any]:
        (whole,) = say(request, ["ä"])
        first, second = whole.logprobs
        return [
            OutputDelta(request.request_id, 0, "", whole.token_ids[:1], (first,)),
            OutputDelta(
                request.request_id, 0, "ä", whole.token_ids[1:], (second,), None, FinishReason.STOP,
                None, whole.usage,
            ),
        ]  # fmt: skip

    served.script(split)
    chunks = served.chunks("/v1/chat/completions", messages=served.ask, logprobs=True)
    entries = [
        c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]
    ]
    assert [e["bytes"] for part in entries for e in part] == [[0xC3], [0xA4]]


def test_b087_logprobs_without_top_logprobs(served: Served):
    response = served.chat(logprobs=True)
    assert response.status_code == 200
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [e["top_logprobs"] for e in content] == [[], []]
    assert served.engine.requests[0].sampling.logprobs == 0


def test_b085_the_floor_of_log_probabilities_is_json(served: Served):
    def floor(request: GenerationRequest) -> list[Any]:
        (d,) = say(request, ["a"])
        entry = TokenLogprob(97, 0.0, ((97, 0.0), (98, -9999.0)))
        return [
            OutputDelta(d.request_id, 0, "a", (97,), (entry,), None, d.finish_reason, None, d.usage)
        ]

    served.script(floor)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    response = served.chat(logprobs=True, top_logprobs=2, top_k=1)
    body = json.loads(response.content, parse_constant=refuse)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0


def test_no_logprobs_unless_asked(served: Served):
    assert served.chat().json()["choices"][0]["logprobs"] is None
    assert served.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    response = served.chat(logprobs=False, top_logprobs=2)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_logprobs"


def test_content_may_be_text_parts(served: Served):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    served.chat(messages=[{"role": "user", "content": parts}])
    assert served.engine.requests[0].prompt_token_ids == (BOS, *b"user:a\nb;assistant:")


def test_null_content_of_an_answer_is_empty(served: Served):
    served.chat(messages=[*served.ask, {"role": "assistant", "content": None}, *served.ask])
    prompt = served.engine.requests[0].prompt_token_ids
    assert prompt == (BOS, *b"user:hi;assistant:;user:hi;assistant:")


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_only_an_answer_may_have_no_content(served: Served, role: str, message: dict[str, Any]):
    response = served.chat(messages=[*served.ask, {"role": role, **message}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.1.content"
    assert served.engine.requests == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://unreachable.invalid/cat.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
)
def test_b151_parts_that_are_not_text_are_400(served: Served, part: dict[str, Any]):
    response = served.chat(messages=[{"role": "user", "content": [part]}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert "messages[0].content[0]" in error["message"]
    assert "takes text only" in error["message"]


def test_template_fields_reach_the_template(served: Served):
    served.chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert served.frontend.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert served.chat(chat_template_kwargs={"messages": []}).status_code == 400
    response = served.chat(
        reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}
    )
    assert response.status_code == 400


def test_final_message_can_be_continued(served: Served):
    messages = [*served.ask, {"role": "assistant", "content": "so"}]
    served.chat(messages=messages, continue_final_message=True)
    served.chat(messages=messages, add_generation_prompt=False)
    assert served.engine.requests[0].prompt_token_ids == (BOS, *b"user:hi;assistant:so")
    assert served.engine.requests[1].prompt_token_ids == (BOS, *b"user:hi;assistant:so;")
    for wrong in (
        {"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": served.ask, "continue_final_message": True},
    ):
        assert served.chat(**wrong).json()["error"]["param"] == "continue_final_message"
