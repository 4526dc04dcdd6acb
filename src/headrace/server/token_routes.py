"""``POST /tokenize`` and ``/detokenize``: count before sending."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from headrace.core.errors import RequestError
from headrace.server.conversation import template_messages, template_options
from headrace.server.frontend import TextFrontend
from headrace.server.params import check_model, check_token_ids
from headrace.server.schema import DetokenizeRequest, TokenizeRequest, parse_body
from headrace.server.services import Services, in_thread, read_json


def token_router(services: Services) -> APIRouter:
    """Return the routes, bound to ``services``."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        info, text = services.ready()
        fields = parse_body(TokenizeRequest, await read_json(request))
        check_model(fields.model, services.model_ids(info))
        ids = await in_thread(_token_ids, fields, text)
        return {"tokens": ids, "count": len(ids), "max_model_len": info.context}

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        info, text = services.ready()
        fields = parse_body(DetokenizeRequest, await read_json(request))
        check_model(fields.model, services.model_ids(info))
        ids = check_token_ids("tokens", fields.tokens, info.vocab)
        content = await in_thread(text.decode, ids)
        return {"content": content, "prompt": content}  # llama.cpp's and vLLM's names

    return router


def _token_ids(fields: TokenizeRequest, text: TextFrontend) -> list[int]:
    given = [n for n in ("messages", "content", "prompt") if getattr(fields, n) is not None]
    if len(given) != 1:
        raise RequestError(
            f"expected one of messages, content and prompt, found {' and '.join(given) or 'none'}",
            hint="give the text as content, or a conversation as messages",
            param=given[1] if given else "content",
        )
    specials = [n for n in ("add_special", "parse_special") if getattr(fields, n) is not None]
    if fields.messages is not None:
        if specials:
            raise RequestError(
                f"{specials[0]} is given with messages, whose special tokens the template sets",
                hint="leave it out",
                param=specials[0],
            )
        return text.encode_chat(
            template_messages(fields.messages), **template_options(fields, fields.messages)
        )
    return text.encode(
        fields.content if fields.content is not None else fields.prompt or "",
        add_special=fields.add_special is not False,
        parse_special=fields.parse_special is not False,
    )
