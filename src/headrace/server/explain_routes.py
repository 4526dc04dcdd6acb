"""``GET /v1/explain``: where the time of the engine's steps goes."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from fastapi import APIRouter, Request

from headrace.core.errors import InternalError, RequestError
from headrace.core.messages import Explain
from headrace.server.services import Services

STEPS, MOST_STEPS = 32, 1024
TIMEOUT_S = 10.0
PARAMETERS = ("step", "steps")


def explain_router(services: Services) -> APIRouter:
    """Return the route, bound to ``services``."""
    router = APIRouter()

    @router.get("/v1/explain")
    async def explain(request: Request) -> dict[str, Any]:
        info = services.engine()
        query = request.query_params
        unknown = [name for name in query if name not in PARAMETERS]
        if unknown:
            raise RequestError(
                f"{unknown[0]!r} is not a parameter of /v1/explain",
                hint=f"it takes {' and '.join(PARAMETERS)}",
                param=unknown[0],
            )
        twice = [name for name in query if len(query.getlist(name)) > 1]
        if twice:
            raise RequestError(
                f"{twice[0]} is given {len(query.getlist(twice[0]))} times",
                hint="give it once",
                param=twice[0],
            )
        phase = _phase(query.get("step", "decode"))
        command = Explain(uuid.uuid4().hex, phase, _steps(query.get("steps")), TIMEOUT_S)
        answer = await services.client.explain(command)
        if answer.report is not None:
            # Under the name that clients know, not the path that the engine was started with.
            return {**answer.report, "model": services.model_ids(info)[0]}
        if answer.message:
            raise InternalError(answer.message, hint=answer.hint)
        raise RequestError(
            f"the engine made no {phase} step within {TIMEOUT_S:g} s",
            hint="ask again while such requests run, or while none do",
            param="step",
        )

    return router


def _phase(text: str) -> Literal["prefill", "decode"]:
    if text == "decode":
        return "decode"
    if text == "prefill":
        return "prefill"
    raise RequestError(f"step is {text!r}; it must be decode or prefill", param="step")


def _steps(text: str | None) -> int:
    if text is None:
        return STEPS
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_STEPS:
        return int(text)
    raise RequestError(
        f"steps is {text!r}; it must be a whole number from 1 to {MOST_STEPS}", param="steps"
    )
