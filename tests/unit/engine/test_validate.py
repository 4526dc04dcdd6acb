"""Everything that a request may ask for is checked in one place, by field."""

import math

import pytest

from headrace.core.errors import RequestError
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.engine.validate import validate_request

VOCAB = 100


def check(prompt=(1,), **params):
    validate_request(GenerationRequest("r", tuple(prompt), SamplingParams(**params)), VOCAB)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_p", [0.0, -1.0, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("top_k", [-2]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.0, 0.0099, 100.1, -1.0, math.inf, math.nan]),
        ("n", [0, -1, 129]),
        ("max_tokens", [0, -1]),
        ("seed", [2**63, -(2**63) - 1]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("stop", [("",), ("a", "")]),
        ("stop_token_ids", [(100,), (-1,)]),
        ("logit_bias", [((100, 1.0),), ((-1, 1.0),), ((3, 101.0),), ((3, math.nan),)]),
        ("logit_bias", [((3, 1.0), (3, 2.0))]),
    ],
)
def test_values_out_of_range_are_refused_by_field(field, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            check(**{field: value})
        assert caught.value.param == field
        assert field in caught.value.message


def test_b083_max_tokens_none_is_absent_and_zero_or_less_is_refused():
    check(max_tokens=None)
    check(max_tokens=1)
    for value in (0, -5):
        with pytest.raises(RequestError) as caught:
            check(max_tokens=value)
        assert caught.value.param == "max_tokens"


def test_b073_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty string"):
        check(stop=("",))


def test_prompts_are_checked():
    for prompt in ((), (100,), (5, -1)):
        with pytest.raises(RequestError) as caught:
            check(prompt)
        assert caught.value.param == "prompt"


def test_bounds_are_allowed():
    check((0, 99), temperature=0.0, top_p=1.0, min_p=1.0, top_k=-1, n=128, seed=-(2**63))
    check(presence_penalty=-2.0, frequency_penalty=2.0, logprobs=20, prompt_logprobs=0)
    check(repetition_penalty=0.01)
    check(repetition_penalty=100.0)
    check(logit_bias=((0, -100.0), (99, 100.0)), stop_token_ids=(0, 99), stop=("a", "b"))
