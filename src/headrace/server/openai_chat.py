"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from headrace.core.errors import RequestError
from headrace.core.request import GenerationRequest, OutputDelta, TokenLogprob, Usage
from headrace.server.conversation import template_messages, template_options
from headrace.server.frontend import TextFrontend
from headrace.server.logprobs import chat_entries
from headrace.server.params import (
    check_model,
    check_prompt,
    check_stream_options,
    merged_max_tokens,
    sampling_params,
)
from headrace.server.schema import ChatRequest, parse_body
from headrace.server.services import Services, in_thread, read_json, while_connected
from headrace.server.sse import EventStream, data_event
from headrace.server.usage import usage_object


@dataclass(frozen=True)
class _Reply:
    """What all objects of one reply have in common, and what the caller asked to see."""

    id: str
    created: int
    model: str
    logprobs: bool
    top_logprobs: int
    include_usage: bool
    text: TextFrontend

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.include_usage:  # then every chunk has the key, null until the last
            body["usage"] = None if usage is None else usage_object(usage)
        return data_event(body)

    def logprob_object(self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> Any:
        if not self.logprobs:
            return None
        return {"content": chat_entries(entries, self.text, self.top_logprobs), "refusal": None}


def chat_router(services: Services) -> APIRouter:
    """Return the route, bound to ``services``."""
    router = APIRouter()
    body = {"content": {"application/json": {"schema": ChatRequest.model_json_schema()}}}

    @router.post("/v1/chat/completions", openapi_extra={"requestBody": body})
    async def chat_completions(request: Request) -> Response:
        info, text = services.ready()
        fields = parse_body(ChatRequest, await read_json(request))
        model_ids = services.model_ids(info)
        check_model(fields.model, model_ids)
        reply = _Reply(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model_ids[0],
            logprobs=bool(fields.logprobs),
            top_logprobs=fields.top_logprobs or 0,
            include_usage=check_stream_options(fields),
            text=text,
        )
        sampling = sampling_params(
            fields,
            info,
            max_tokens=merged_max_tokens(fields.max_tokens, fields.max_completion_tokens),
            logprobs=_num_logprobs(fields),
        )
        ids = await in_thread(
            text.encode_chat,
            template_messages(fields.messages),
            **template_options(fields, fields.messages),
        )
        generation = GenerationRequest(
            request_id=reply.id,
            prompt_token_ids=check_prompt(ids, info, "messages"),
            sampling=sampling,
            cache_salt=fields.cache_salt or "",
        )
        if fields.stream:
            events = _events(services, reply, generation)
            return EventStream(events, services.settings.keepalive_s)
        return await while_connected(request, _whole(services, reply, generation))

    return router


async def _events(
    services: Services, reply: _Reply, generation: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a streamed reply: a role first, one finish reason per choice, usage."""
    introduced: set[int] = set()
    usage: Usage | None = None
    async with aclosing(services.generate(generation)) as deltas:
        async for delta in deltas:
            if delta.index not in introduced:
                introduced.add(delta.index)
                first = {"role": "assistant", "content": ""}
                yield reply.chunk([_chunk_choice(delta.index, first, None, None)])
            choice = _delta_choice(reply, delta)
            if choice is not None:
                yield reply.chunk([choice])
            usage = delta.usage or usage
    if reply.include_usage and usage is not None:
        yield reply.chunk([], usage)


def _delta_choice(reply: _Reply, delta: OutputDelta) -> dict[str, Any] | None:
    """Return the choice for one delta, or None when there is nothing to tell."""
    entries = delta.logprobs if reply.logprobs else ()
    if not (delta.text or entries or delta.finish_reason):
        return None
    content = {"content": delta.text} if delta.text or entries else {}
    logprobs = reply.logprob_object(entries) if entries else None
    return _chunk_choice(delta.index, content, logprobs, delta.finish_reason)


def _chunk_choice(
    index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None
) -> dict[str, Any]:
    # finish_reason is always there: clients tell "not yet" from a cut stream by it.
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


async def _whole(services: Services, reply: _Reply, generation: GenerationRequest) -> Response:
    """Return the whole reply as one object."""
    n = generation.sampling.n
    texts: list[list[str]] = [[] for _ in range(n)]
    entries: list[list[TokenLogprob]] = [[] for _ in range(n)]
    reasons: list[str | None] = [None] * n
    usage: Usage | None = None
    async with aclosing(services.generate(generation)) as deltas:
        async for delta in deltas:
            texts[delta.index].append(delta.text)
            entries[delta.index].extend(delta.logprobs)
            reasons[delta.index] = delta.finish_reason or reasons[delta.index]
            usage = delta.usage or usage
    assert usage is not None, "the last delta of a request carries usage"
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": "".join(texts[i]), "refusal": None},
            "logprobs": reply.logprob_object(entries[i]),
            "finish_reason": reasons[i],
        }
        for i in range(n)
    ]
    return JSONResponse(
        {
            "id": reply.id,
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
            "usage": usage_object(usage),
        }
    )


def _num_logprobs(fields: ChatRequest) -> int | None:
    """Return how many alternatives the engine must report per token; None: no logprobs at all."""
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise RequestError(
            f"top_logprobs is {fields.top_logprobs}, but logprobs is not true",
            hint="set logprobs to true as well",
            param="top_logprobs",
        )
    return None
