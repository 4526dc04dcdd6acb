"""API key and body size, checked before a route sees the request. Plain ASGI, so streams pass."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.errors import UnauthorizedError
from headrace.core.words import counted
from headrace.server.errors import error_response, status_response

OPEN_PATHS = ("/health",)  # probes of supervisors and load balancers carry no key


class ApiKeyMiddleware:
    """Refuses requests without the key, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        error = UnauthorizedError(
            "the API key is missing or wrong",
            hint="send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        )
        await error_response(error)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if kind.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))
        # Both are compared in full, in constant time, whatever the first one gave.
        matches = [hmac.compare_digest(g.encode("latin-1"), self.api_key) for g in given]
        return any(matches)


class _TooLarge(Exception):
    """The body has passed the limit."""


class BodyLimitMiddleware:
    """Answers 413 to bodies over the limit, by their declared length or while they arrive."""

    def __init__(self, app: ASGIApp, max_nbytes: int) -> None:
        self.app = app
        self.max_nbytes = max_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self.max_nbytes:
            await self._refuse(scope, receive, send)
            return
        seen = 0
        started = False

        async def limited_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_nbytes:
                raise _TooLarge
            return message

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, limited_receive, noting_send)
        except _TooLarge:
            if started:
                raise
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = status_response(
            413,
            f"the request body is larger than {counted(self.max_nbytes, 'byte')}"
            "\nhint: send less in one request",
            code="request_too_large",
            # What is left of the body is not read, so the connection cannot be used again.
            headers={"Connection": "close"},
        )
        await response(scope, receive, send)
