"""Server-sent events: the framing, and a response that keeps quiet streams alive.

Written by hand, since what is needed is three lines of framing and a timer with particular
properties: comments are due after a time of silence *on the wire* (events that send nothing do not
count), the response's status is decided by the first event, and a client that has gone is noticed
while nothing is being sent. The packages looked at ping at a fixed period, start with status 200
before anything is known, or install process-wide shutdown hooks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.errors import HeadraceError
from headrace.server.errors import error_body, error_response

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx buffers event streams otherwise
]


def data_event(payload: dict[str, Any]) -> bytes:
    """Return one ``data:`` event with ``payload`` as JSON (which has no raw line breaks)."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone; the request's body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventStream(Response):
    """Sends the chunks of ``events`` as they come, then ``[DONE]``.

    The response starts with the first chunk or after ``keepalive_s``, whichever is sooner: a
    request that is refused before then gets its proper status instead of an open stream. Later
    errors become an error event. When the client goes, ``events`` is closed at once.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], keepalive_s: float) -> None:
        super().__init__()
        self.events = events
        self.keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(scope, receive, send))
        gone = asyncio.create_task(wait_disconnect(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(gone)
            await cancel_and_wait(writer)
            await self.events.aclose()
        if writer.done() and not writer.cancelled():
            writer.result()

    async def _next(self) -> bytes | None:
        return await anext(self.events, None)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def push(chunk: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        step: asyncio.Task[bytes | None] | None = None
        try:
            while True:
                step = asyncio.create_task(self._next())
                while not (await asyncio.wait({step}, timeout=self.keepalive_s))[0]:
                    await push(KEEPALIVE)
                chunk = step.result()
                if chunk is None:
                    break
                await push(chunk)
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log.exception("a stream failed")
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await push(data_event(error_body(error)))
        finally:
            if step is not None:
                await cancel_and_wait(step)
        await push(DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` and wait until it has ended; its result or error stays readable."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # marks it as seen
