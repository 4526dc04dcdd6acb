"""Errors as the OpenAI API shows them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headrace.core.errors import EngineLoadingError, HeadraceError, outcome_of

log = logging.getLogger(__name__)

# Loading takes seconds to minutes; clients that honour Retry-After then poll every 2 s.
RETRY_AFTER_LOADING_S = 2


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the ``{"error": {...}}`` object for ``error``; the hint is part of the message."""
    outcome = outcome_of(error)
    if isinstance(error, HeadraceError):
        message, param, code = str(error), error.param, error.code or outcome.openai_code
    else:
        # Internals of an unexpected exception belong into the log, not to the caller.
        message, param, code = f"internal error ({type(error).__name__})", None, outcome.openai_code
    return {
        "error": {"message": message, "type": outcome.openai_type, "param": param, "code": code}
    }


def error_response(error: BaseException) -> JSONResponse:
    """Return the JSON response for ``error``, with its status from the outcome table."""
    headers: dict[str, str] = {}
    if isinstance(error, EngineLoadingError):
        headers["Retry-After"] = str(RETRY_AFTER_LOADING_S)
    status = outcome_of(error).http_status
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def status_response(
    status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an error object for faults of HTTP itself (no such route, method, body size)."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


async def _on_headrace_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        message = f"no such route: {where}\nhint: the routes are listed at /docs"
        return status_response(404, message, code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{where} is not possible\nhint: this route takes {allowed}"
        return status_response(
            405, message, code="method_not_allowed", headers=dict(error.headers or {})
        )
    return status_response(error.status_code, str(error.detail), headers=dict(error.headers or {}))


async def _on_exception(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app``'s routes an OpenAI error object."""
    app.add_exception_handler(HeadraceError, _on_headrace_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)
