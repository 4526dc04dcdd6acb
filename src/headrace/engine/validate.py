"""Checks a request once, before it is queued: what passes here can be acted on in full."""

from __future__ import annotations

import math

from headrace.core.errors import ContextLengthError, RequestError
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.sampling_limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)


def validate_length(num_prompt: int, limit: int, context: int) -> None:
    """Refuse a prompt that leaves no room for one token of answer.

    Args:
        limit: tokens that a sequence may hold here; context: that the model may see.

    Raises:
        ContextLengthError: it has ``limit`` tokens or more.
    """
    if num_prompt < limit:
        return
    raise ContextLengthError(
        f"This model's maximum context length is {limit} tokens here, and one of them "
        f"has to be left for the answer. The prompt has {num_prompt} tokens.",
        hint="shorten the prompt"
        + (
            ", or raise --ram-budget: the KV pool is smaller than the context"
            if limit < context
            else ", or start with a larger --context"
        ),
        param="messages",
        code="context_length_exceeded",
    )


def validate_request(request: GenerationRequest, vocab: int) -> None:
    """Refuse what is malformed or out of range.

    Args:
        request: as submitted.
        vocab: the width of the model's logits.

    Raises:
        RequestError: ``param`` names the field.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError(
            "the prompt is empty: it has no token to continue from",
            hint="give a text, or at least the begin-of-text token",
            param="prompt",
        )
    _check_ids(prompt, vocab, "prompt")
    p = request.sampling
    _check_numbers(p)
    _check_counts(p)
    _check_tokens(p, vocab)
    for i, stop in enumerate(p.stop):
        if not stop:
            raise RequestError(
                f"stop[{i}] is an empty string, which would end every answer at once",
                hint="leave stop out to go on to the end of the answer",
                param="stop",
            )


def _refuse(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} is {value}; it must be {expected}", param=name)


def _check_numbers(p: SamplingParams) -> None:
    if not (math.isfinite(p.temperature) and p.temperature >= 0):
        raise _refuse("temperature", p.temperature, "a finite number, 0 or more")
    if not 0 < p.top_p <= 1:
        raise _refuse("top_p", p.top_p, "above 0 and at most 1")
    if not 0 <= p.min_p <= 1:
        raise _refuse("min_p", p.min_p, "from 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        value: float = getattr(p, name)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise _refuse(name, value, f"from {-MAX_PENALTY} to {MAX_PENALTY}")
    if not MIN_REPETITION_PENALTY <= p.repetition_penalty <= MAX_REPETITION_PENALTY:
        allowed = f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        raise _refuse("repetition_penalty", p.repetition_penalty, allowed)


def _check_counts(p: SamplingParams) -> None:
    if p.top_k < -1:
        raise _refuse("top_k", p.top_k, "1 or more, or 0 or -1 to switch it off")
    if not 1 <= p.n <= MAX_CHOICES:
        raise _refuse("n", p.n, f"from 1 to {MAX_CHOICES}")
    if p.max_tokens is not None and p.max_tokens < 1:
        raise _refuse("max_tokens", p.max_tokens, "1 or more, or absent")
    for name in ("logprobs", "prompt_logprobs"):
        value: int | None = getattr(p, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise _refuse(name, value, f"from 0 to {MAX_LOGPROBS}")
    if p.seed is not None and not -(2**63) <= p.seed < 2**63:
        raise _refuse("seed", p.seed, "a signed 64-bit integer")


def _check_tokens(p: SamplingParams, vocab: int) -> None:
    _check_ids(p.stop_token_ids, vocab, "stop_token_ids")
    _check_ids([i for i, _ in p.logit_bias], vocab, "logit_bias")
    if len({i for i, _ in p.logit_bias}) < len(p.logit_bias):
        raise RequestError("logit_bias names a token id twice", param="logit_bias")
    for token_id, bias in p.logit_bias:
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias of token {token_id} is {bias}; it must be from {-MAX_LOGIT_BIAS} to "
                f"{MAX_LOGIT_BIAS}",
                param="logit_bias",
            )


def _check_ids(ids: tuple[int, ...] | list[int], vocab: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        bad = next(i for i in ids if not 0 <= i < vocab)
        raise RequestError(
            f"{param} has token id {bad}; the model's vocabulary has ids 0 to {vocab - 1}",
            param=param,
        )
