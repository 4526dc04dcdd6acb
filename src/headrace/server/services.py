"""What the routes share, given to each app once; and how requests run on the engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.errors import (
    EngineDeadError,
    EngineLoadingError,
    EngineStuckError,
    InternalError,
    RequestError,
)
from headrace.core.nesting import MAX_LEVELS, is_too_deep
from headrace.core.request import FinishReason, GenerationRequest, OutputDelta
from headrace.core.status import EngineInfo
from headrace.server.client import EngineClient, require_ready
from headrace.server.frontend import TextFrontend
from headrace.server.metrics import Metrics
from headrace.server.settings import ServerSettings
from headrace.server.sse import cancel_and_wait, wait_disconnect

R = TypeVar("R")

# nginx's status for "client closed the request"; nobody reads the reply, access logs show it.
STATUS_CLIENT_GONE = 499


@dataclass
class Services:
    """The engine, the text front end (None until its files are read), the settings, the metrics."""

    client: EngineClient
    frontend: TextFrontend | None
    settings: ServerSettings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    def ready(self) -> tuple[EngineInfo, TextFrontend]:
        """Return the engine's facts and the text front end.

        Raises:
            EngineLoadingError: one of them is not loaded yet.
            EngineDeadError, EngineStuckError: see ``engine``.
        """
        info = self.engine()
        if self.frontend is None:
            raise EngineLoadingError(
                "the tokenizer is still loading",
                hint="retry in a moment; GET /health answers 200 once the model is ready",
            )
        return info, self.frontend

    def engine(self) -> EngineInfo:
        """Return the engine's facts, for what needs no text.

        Raises:
            EngineLoadingError: it is not loaded yet.
            EngineDeadError: it has ended.
            EngineStuckError: it has said nothing for too long.
        """
        info = require_ready(self.client)
        if self.stuck:
            raise EngineStuckError(
                f"the engine has said nothing for {self.client.silent_s:.0f} s (--stuck-after "
                f"{self.settings.stuck_s:g})",
                hint="it may hang: restart the server; or its steps take as long: raise --stuck-after",
            )
        return info

    @property
    def stuck(self) -> bool:
        """Whether the engine owes an answer and has been silent for too long."""
        return 0 < self.settings.stuck_s < self.client.silent_s

    def model_ids(self, info: EngineInfo) -> tuple[str, ...]:
        """Return the names that requests may use; replies carry the first."""
        return self.settings.model_ids or (info.model,)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """Run one request with its times measured; closing the generator cancels it.

        Raises:
            HeadraceError: the request failed.
        """
        observe = self.metrics.request_timer()
        async with aclosing(self.client.generate(request)) as deltas:
            async for delta in deltas:
                observe(delta)
                if delta.finish_reason is FinishReason.CANCELLED:
                    raise EngineDeadError(
                        "the request was cancelled by the server",
                        hint="the server is shutting down; retry later",
                    )
                if delta.finish_reason is FinishReason.ERROR:
                    raise InternalError("the request ended with an error in the engine")
                yield delta

    async def generate_all(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Run several requests at once and yield (which, delta) as they come.

        The first failure ends them all.
        """
        if len(requests) == 1:
            async with aclosing(self.generate(requests[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue()

        async def pump(which: int, request: GenerationRequest) -> None:
            try:
                async with aclosing(self.generate(request)) as deltas:
                    async for delta in deltas:
                        queue.put_nowait((which, delta))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(i, r)) for i, r in enumerate(requests)]
        try:
            open_requests = len(tasks)
            while open_requests:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_requests -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                await cancel_and_wait(task)


async def in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run a long call (tokenising a prompt) beside the event loop; a cancelled wait leaves it."""
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), abandon_on_cancel=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what ``work`` makes, or stop it as soon as the client has gone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=STATUS_CLIENT_GONE)
        return task.result()
    finally:
        await cancel_and_wait(gone)
        await cancel_and_wait(task)


async def read_json(request: Request) -> Any:
    """Return the request's body as JSON.

    Raises:
        RequestError: it is not JSON, or holds what JSON and UTF-8 cannot carry.
    """
    kind = request.headers.get("content-type", "")
    if "origin" in request.headers and not kind.startswith("application/json"):
        # Browsers ask before they send JSON across origins, but not before other types: a web page
        # could otherwise make the reader's own server work for it.
        raise RequestError(
            f"a browser sent the content type {kind[:80]!r}, expected application/json",
            hint="send JSON; allow the page's origin with --cors-origin",
        )
    body = await request.body()

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
        return found

    try:
        payload = json.loads(body, parse_constant=refuse, object_pairs_hook=without_repeats)
        if b"\\ud" in body or b"\\uD" in body:  # an escaped lone surrogate is not Unicode text
            json.dumps(payload, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(
            f"the request body is not valid JSON: {str(error)[:200]}",
            hint="send one UTF-8 JSON object",
        ) from None
    # Counting brackets spares almost every body the walk.
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and is_too_deep(payload):
        raise _too_deep()
    return payload


def _too_deep() -> RequestError:
    return RequestError(
        f"the request body has lists and objects more than {MAX_LEVELS} levels deep in each other",
        hint="flatten what is nested, or send it as text",
    )
