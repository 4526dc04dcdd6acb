"""From request fields to ``SamplingParams``, with the checks that need the loaded model."""

from __future__ import annotations

from headrace.core.errors import ContextLengthError, ModelNotFoundError, RequestError
from headrace.core.request import SamplingParams
from headrace.core.status import EngineInfo
from headrace.core.words import counted
from headrace.server.schema import SamplingFields
from headrace.text.stop import validate_stops


def sampling_params(
    fields: SamplingFields,
    info: EngineInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters that ``fields`` ask for; absent ones get OpenAI's defaults.

    Raises:
        RequestError: a token id is outside the vocabulary, or a stop string is empty.
    """
    return SamplingParams(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=max(fields.top_k or 0, 0),
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias or {}, info.vocab),
        seed=fields.seed,
        stop=validate_stops(fields.stop),
        stop_token_ids=check_token_ids("stop_token_ids", fields.stop_token_ids or [], info.vocab),
        include_stop=bool(fields.include_stop_str_in_output),
        ignore_eos=bool(fields.ignore_eos),
        max_tokens=max_tokens,
        n=fields.n or 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def merged_max_tokens(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """Return the one limit that two fields of the same meaning give.

    Raises:
        RequestError: both are given and differ.
    """
    if max_tokens is None or max_completion_tokens is None:
        return max_completion_tokens if max_tokens is None else max_tokens
    if max_tokens != max_completion_tokens:
        raise RequestError(
            f"max_tokens is {max_tokens} and max_completion_tokens is {max_completion_tokens}",
            hint="give one of them; they mean the same",
            param="max_completion_tokens",
        )
    return max_tokens


def check_prompt(token_ids: list[int], info: EngineInfo, param: str) -> tuple[int, ...]:
    """Return the prompt as a tuple, if the model can continue it.

    Raises:
        RequestError: the prompt is empty, or a token id is outside the vocabulary.
        ContextLengthError: no room is left in the context for one token of an answer.
    """
    if not token_ids:
        raise RequestError(
            "the prompt is empty: there is nothing to continue",
            hint="give at least one token",
            param=param,
        )
    ids = check_token_ids(param, token_ids, info.vocab)
    if len(ids) >= info.context:
        raise ContextLengthError(
            f"This model's maximum context length is {counted(info.context, 'token')}. However, the "
            f"prompt has {counted(len(ids), 'token')}, and an answer needs at least one more.",
            hint="shorten the messages, or start the server with a larger --context",
            param=param,
        )
    return ids


def check_stream_options(fields: SamplingFields) -> bool:
    """Return whether a usage chunk is asked for.

    Raises:
        RequestError: stream options are given for a reply that is not streamed.
    """
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise RequestError(
            "stream_options is given, but stream is not true",
            hint="leave it out; replies that are not streamed always carry usage",
            param="stream_options",
        )
    return bool(fields.stream_options.include_usage)


def check_model(name: str | None, served: tuple[str, ...]) -> None:
    """Check that ``name``, if given, is one of the ``served`` names.

    Raises:
        ModelNotFoundError: it is not; the message lists what is served.
    """
    if name is not None and name not in served:
        raise ModelNotFoundError(
            f"the model {name[:80]!r} is not served here; served: {', '.join(served)}",
            hint="use that name, or start the server with --model-name",
            param="model",
        )


def _logit_bias(bias: dict[str, float], vocab: int) -> tuple[tuple[int, float], ...]:
    entries: list[tuple[int, float]] = []
    for key, value in bias.items():
        # int() also takes " 7", "7_0" and other digits than ASCII's; a token id is none of these.
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise RequestError(
                f"logit_bias has the key {key[:80]!r}, expected a token id",
                hint="keys are token ids in decimal digits",
                param="logit_bias",
            )
        entries.append((int(key), value))
    check_token_ids("logit_bias", [token_id for token_id, _ in entries], vocab)
    if len({token_id for token_id, _ in entries}) < len(entries):
        raise RequestError(
            "logit_bias names a token id twice, written differently",
            hint="give one bias per token id",
            param="logit_bias",
        )
    return tuple(entries)


def check_token_ids(param: str, ids: list[int], vocab: int) -> tuple[int, ...]:
    """Return ``ids``, all within the vocabulary.

    Raises:
        RequestError: one of them is not.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise RequestError(
            f"{param} holds the token id {wrong}; the vocabulary has the ids 0 to {vocab - 1}",
            hint="POST /tokenize gives a text's token ids",
            param=param,
        )
    return tuple(ids)
