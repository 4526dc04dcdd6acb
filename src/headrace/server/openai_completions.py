"""``POST /v1/completions``: plain text in, text out; prompts as strings or token ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from headrace.core.errors import InternalError, RequestError
from headrace.core.request import GenerationRequest, OutputDelta, TokenLogprob, Usage
from headrace.core.status import EngineInfo
from headrace.core.words import counted
from headrace.server.frontend import TextFrontend
from headrace.server.logprobs import CompletionLogprobs
from headrace.server.params import (
    check_model,
    check_prompt,
    check_stream_options,
    sampling_params,
)
from headrace.server.schema import CompletionRequest, parse_body
from headrace.server.services import Services, in_thread, read_json, while_connected
from headrace.server.sse import EventStream, data_event
from headrace.server.usage import summed, usage_object

# Prompts of one request run as requests of their own; this bounds what one body can start.
MAX_PROMPTS = 1024


@dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    text: str  # what echo repeats


@dataclass(frozen=True)
class _Piece:
    """What one choice gained."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


@dataclass
class _Reply:
    """What all objects of one reply have in common, what was asked for, and the usage so far."""

    id: str
    created: int
    model: str
    echo: bool
    logprobs: int | None
    n: int
    include_usage: bool
    text: TextFrontend
    prompts: list[_Prompt]
    usages: list[Usage] = field(default_factory=list[Usage])

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def completions_router(services: Services) -> APIRouter:
    """Return the route, bound to ``services``."""
    router = APIRouter()
    body = {"content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}}

    @router.post("/v1/completions", openapi_extra={"requestBody": body})
    async def completions(request: Request) -> Response:
        info, text = services.ready()
        fields = parse_body(CompletionRequest, await read_json(request))
        model_ids = services.model_ids(info)
        check_model(fields.model, model_ids)
        _check_best_of(fields)
        include_usage = check_stream_options(fields)
        sampling = sampling_params(
            fields,
            info,
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.logprobs if fields.echo else None,
        )
        reply = _Reply(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model_ids[0],
            echo=bool(fields.echo),
            logprobs=fields.logprobs,
            n=sampling.n,
            include_usage=include_usage,
            text=text,
            prompts=await in_thread(_prompts, fields.prompt, text, info),
        )
        generations = [
            GenerationRequest(f"{reply.id}-{i}", prompt.ids, sampling, fields.cache_salt or "")
            for i, prompt in enumerate(reply.prompts)
        ]
        pieces = _pieces(services, reply, generations)
        if fields.stream:
            return EventStream(_events(reply, pieces), services.settings.keepalive_s)
        return await while_connected(request, _whole(reply, pieces))

    return router


def _prompts(
    given: str | list[str] | list[int] | list[list[int]], text: TextFrontend, info: EngineInfo
) -> list[_Prompt]:
    """Return the prompts in order: one string, strings, one list of token ids, or such lists."""
    listed = cast("list[str | list[int]]", given if isinstance(given, list) else [given])
    if isinstance(given, list) and given and isinstance(given[0], int):
        listed = [cast("list[int]", given)]
    if not 0 < len(listed) <= MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {counted(len(listed), 'prompt')}, expected 1 to {MAX_PROMPTS}",
            hint="send at least one prompt, or several requests",
            param="prompt",
        )
    prompts: list[_Prompt] = []
    for one in listed:
        if isinstance(one, str):
            prompts.append(_Prompt(check_prompt(text.encode(one), info, "prompt"), one))
        else:
            ids = check_prompt(one, info, "prompt")
            prompts.append(_Prompt(ids, text.decode(ids)))
    return prompts


def _check_best_of(fields: CompletionRequest) -> None:
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise RequestError(
            f"best_of is {fields.best_of} and n is {fields.n or 1}; choosing among candidates is"
            " not supported",
            hint="leave best_of out and ask for n choices",
            param="best_of",
        )


async def _pieces(
    services: Services, reply: _Reply, generations: list[GenerationRequest]
) -> AsyncGenerator[_Piece, None]:
    """Yield what each choice gains, an echo first; choice index = prompt * n + sequence."""
    logprobs: dict[int, CompletionLogprobs] = {}
    prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
    held: dict[int, list[OutputDelta]] = {}
    need_prompt_logprobs = reply.echo and reply.logprobs is not None
    async with aclosing(services.generate_all(generations)) as deltas:
        async for which, delta in deltas:
            if delta.usage is not None:
                reply.usages.append(delta.usage)
            if delta.prompt_logprobs is not None:
                prompt_logprobs[which] = delta.prompt_logprobs
            ready = held.setdefault(which, [])
            ready.append(delta)
            if need_prompt_logprobs and which not in prompt_logprobs:
                continue  # they come with sequence 0, which another sequence may precede
            for one in ready:
                index = which * reply.n + one.index
                if index not in logprobs:
                    logprobs[index] = CompletionLogprobs(reply.text, reply.logprobs or 0)
                    if reply.echo:
                        yield _echo(reply, index, logprobs[index], prompt_logprobs.get(which))
                piece = _piece(reply, index, one, logprobs[index])
                if piece is not None:
                    yield piece
            ready.clear()
    if any(held.values()):
        raise InternalError("the engine gave no log-probabilities for an echoed prompt")


def _echo(
    reply: _Reply,
    index: int,
    logprobs: CompletionLogprobs,
    entries: tuple[TokenLogprob | None, ...] | None,
) -> _Piece:
    prompt = reply.prompts[index // reply.n]
    shown = None if reply.logprobs is None else logprobs.prompt(prompt.ids, entries)
    return _Piece(index, prompt.text, shown, None)


def _piece(
    reply: _Reply, index: int, delta: OutputDelta, logprobs: CompletionLogprobs
) -> _Piece | None:
    """Return what ``delta`` adds to a choice, or None when there is nothing to tell."""
    entries = delta.logprobs if reply.logprobs is not None else ()
    if not (delta.text or entries or delta.finish_reason):
        return None
    shown = logprobs.generated(entries) if entries else None
    return _Piece(index, delta.text, shown, delta.finish_reason)


async def _events(
    reply: _Reply, pieces: AsyncGenerator[_Piece, None]
) -> AsyncGenerator[bytes, None]:
    usage_key = {"usage": None} if reply.include_usage else {}
    async with aclosing(pieces):
        async for piece in pieces:
            yield data_event({**reply.body([_choice(piece)]), **usage_key})
    if reply.include_usage:
        yield data_event({**reply.body([]), "usage": usage_object(summed(reply.usages))})


async def _whole(reply: _Reply, pieces: AsyncGenerator[_Piece, None]) -> Response:
    by_choice: list[list[_Piece]] = [[] for _ in range(len(reply.prompts) * reply.n)]
    async with aclosing(pieces):
        async for piece in pieces:
            by_choice[piece.index].append(piece)
    choices = [_choice(_joined(i, parts, reply.logprobs)) for i, parts in enumerate(by_choice)]
    return JSONResponse({**reply.body(choices), "usage": usage_object(summed(reply.usages))})


def _choice(piece: _Piece) -> dict[str, Any]:
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": piece.finish_reason,
    }


def _joined(index: int, parts: list[_Piece], logprobs: int | None) -> _Piece:
    """Return the pieces of one choice as one."""
    merged: dict[str, Any] | None = None
    if logprobs is not None:
        merged = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for part in parts:
            for key in merged if part.logprobs is not None else ():
                merged[key].extend((part.logprobs or {})[key] or ())
        merged["top_logprobs"] = merged["top_logprobs"] if logprobs else None
    reasons = [part.finish_reason for part in parts if part.finish_reason is not None]
    text = "".join(part.text for part in parts)
    return _Piece(index, text, merged, reasons[0] if reasons else None)
