"""The request bodies of the OpenAI routes: every field that is implemented, and no other.

A field that would change the result is acted on or refused; nothing is dropped. Three kinds:

- implemented: the attributes of the models below;
- metadata without influence on the result: ``METADATA_FIELDS``, accepted and unused;
- known but not implemented: ``UNSUPPORTED``, accepted only with a value that asks for nothing.

Any other field is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.core.errors import RequestError
from headrace.core.sampling_limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)

# torch and NumPy generators take signed and unsigned 64-bit seeds; OpenAI's are signed.
_MIN_SEED, _MAX_SEED = -(2**63), 2**63 - 1
MAX_STOPS = 64  # OpenAI allows 4; agents send more

MAX_ECHO = 80  # characters of a wrong value that a message repeats

T = TypeVar("T", bound=BaseModel)

# Names a caller, a log or a cache shard, but never a token of the answer.
METADATA_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


@dataclass(frozen=True)
class Unsupported:
    """A known field that is not implemented: which values ask for nothing, what to do instead."""

    asks_nothing: Callable[[Any], bool]
    hint: str


def _none_or_empty(value: Any) -> bool:
    return value is None or value in ([], {}, "", False)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


_NO_TOOLS = "tool calls are not implemented yet; leave it out"
_TEXT_ONLY = "only text goes in and comes out; leave it out"

UNSUPPORTED: dict[str, Unsupported] = {
    "tools": Unsupported(_none_or_empty, _NO_TOOLS),
    "tool_choice": Unsupported(_one_of(None, "none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": Unsupported(lambda v: v is None or isinstance(v, bool), _NO_TOOLS),
    "functions": Unsupported(_none_or_empty, _NO_TOOLS),
    "function_call": Unsupported(_one_of(None, "none", "auto"), _NO_TOOLS),
    "response_format": Unsupported(
        _one_of(None, {"type": "text"}), "structured output is not implemented yet; leave it out"
    ),
    "audio": Unsupported(_none_or_empty, _TEXT_ONLY),
    "modalities": Unsupported(_one_of(None, ["text"]), _TEXT_ONLY),
    "web_search_options": Unsupported(lambda v: v is None, "the server has no web search"),
    "prediction": Unsupported(lambda v: v is None, "predicted outputs are not implemented"),
    "verbosity": Unsupported(lambda v: v is None, "ask for a style in the messages"),
    "logit_processors": Unsupported(_none_or_empty, "use logit_bias"),
    "logits_processors": Unsupported(_none_or_empty, "use logit_bias"),
    "suffix": Unsupported(
        _none_or_empty, "put the model's own fill-in-the-middle tokens into the prompt"
    ),
    "min_tokens": Unsupported(_one_of(None, 0), "use ignore_eos with max_tokens"),
    "guided_json": Unsupported(lambda v: v is None, "structured output is not implemented yet"),
    "guided_regex": Unsupported(lambda v: v is None, "structured output is not implemented yet"),
    "guided_choice": Unsupported(lambda v: v is None, "structured output is not implemented yet"),
    "guided_grammar": Unsupported(lambda v: v is None, "structured output is not implemented yet"),
}


class _Model(BaseModel):
    # strict: "5" is not a number and true is not 1. An int is still a fine float.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads its chunks against size analysis


class SamplingFields(_Model):
    """What both routes take; ``None`` is always the same as leaving the field out."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None = (
        None
    )
    seed: Annotated[int, Field(ge=_MIN_SEED, le=_MAX_SEED)] | None = None
    stop: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None,
        Field(description="a string or a list of strings"),
    ] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


class ChatMessage(BaseModel):
    """One message. Fields beyond these are passed on to the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class TemplateFields(_Model):
    """How the chat template writes a conversation."""

    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(description="a string, strings, token ids, or lists of token ids, not mixed"),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class TokenizeRequest(TemplateFields):
    """Body of ``POST /tokenize``: a text (under one of two names) or a conversation."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None


class DetokenizeRequest(_Model):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def parse_body(model: type[T], payload: Any) -> T:
    """Return the checked body of a request.

    Raises:
        RequestError: a field is wrong, unknown or not implemented; ``param`` names it.
    """
    if not isinstance(payload, dict):
        raise RequestError(
            f"the request body is a JSON {_json_kind(payload)}, expected an object",
            hint='send an object such as {"messages": [...]}',
        )
    fields = cast("dict[str, Any]", payload)  # JSON objects have string keys
    given = {k: v for k, v in fields.items() if k not in METADATA_FIELDS}
    for name in [name for name in given if name in UNSUPPORTED and name not in model.model_fields]:
        rule = UNSUPPORTED[name]
        if not rule.asks_nothing(given.pop(name)):
            raise RequestError(
                f"the field {name} is not supported here", hint=rule.hint, param=name
            )
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _refusal(model, error) from None


def _refusal(model: type[BaseModel], error: ValidationError) -> RequestError:
    """Turn the first fault that pydantic found into an error that names the field."""
    faults = error.errors(include_url=False, include_context=False)
    unknown = [f for f in faults if f["type"] == "extra_forbidden"]
    fault = unknown[0] if unknown else faults[0]
    path = _field_path(fault["loc"])
    where = ".".join(path)
    if unknown:
        known = f"known fields: {', '.join(sorted(model.model_fields))}"
        return RequestError(
            f"unknown field {_short(where)}",
            hint=known if len(path) == 1 else "leave it out",
            param=where,
        )
    if fault["type"] == "missing":
        return RequestError(f"{where} is missing", hint="it has no default", param=where)
    # Several kinds of value may be allowed, each with a fault of its own: one that got past the
    # kind says most; otherwise tell what is allowed.
    same = [f for f in faults if _field_path(f["loc"])[: len(path)] == path]
    closer = [f for f in same if not f["type"].endswith("_type")]
    allowed = model.model_fields[path[0]].description if len(path) == 1 else None
    if closer:
        expected = closer[0]["msg"]
    elif allowed is not None:
        expected = f"Input should be {allowed}"
    else:
        expected = ", or: ".join(dict.fromkeys(f["msg"] for f in same))
    return RequestError(
        f"{where}: {expected} (found {_as_sent(fault['input'])})",
        hint="docs/reference/http-api.md lists each field's values",
        param=where,
    )


def _field_path(loc: Sequence[int | str]) -> list[str]:
    """Return a fault's location without the names of a union's members ("list[str]", "int")."""
    path = [str(part) for part in loc if isinstance(part, int) or part.isidentifier()]
    return path[:1] + [p for p in path[1:] if p not in ("str", "int", "float", "bool")]


def _as_sent(value: Any) -> str:
    """Return ``value`` as JSON of bounded length: a text in quotes, so that "5" is no number."""
    return _short(json.dumps(value, ensure_ascii=False))


def _short(value: Any) -> str:
    """Return ``value`` as text of bounded length, for messages."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "number"
