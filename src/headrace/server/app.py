"""The HTTP application: routes, errors and guards around one engine. Never imports torch."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from headrace import __version__
from headrace.server.client import EngineClient
from headrace.server.errors import add_error_handlers
from headrace.server.explain_routes import explain_router
from headrace.server.frontend import TextFrontend
from headrace.server.metrics import Metrics
from headrace.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from headrace.server.openai_chat import chat_router
from headrace.server.openai_completions import completions_router
from headrace.server.services import Services
from headrace.server.settings import ServerSettings
from headrace.server.status_routes import status_router
from headrace.server.token_routes import token_router


def create_app(
    client: EngineClient,
    frontend: TextFrontend | None = None,
    settings: ServerSettings | None = None,
) -> FastAPI:
    """Return the application that serves ``client``.

    Args:
        client: the engine, loading or ready.
        frontend: tokenizer and template; None while they load: set ``app.state.services.frontend``
            later, requests get 503 until then.
        settings: how the front end behaves; None takes the defaults.
    """
    settings = settings or ServerSettings()
    services = Services(client, frontend, settings, Metrics())
    app = FastAPI(title="Headrace", version=__version__)
    app.state.services = services
    add_error_handlers(app)
    for make_router in (
        chat_router,
        completions_router,
        status_router,
        token_router,
        explain_router,
    ):
        app.include_router(make_router(services))
    # The last one added runs first: answers to preflight requests need no key, errors carry CORS.
    app.add_middleware(BodyLimitMiddleware, max_nbytes=settings.max_body_nbytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app
