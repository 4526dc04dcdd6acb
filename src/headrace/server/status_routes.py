"""``GET /v1/models``, ``/health`` and ``/metrics``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from headrace.core.errors import ModelNotFoundError
from headrace.core.status import EngineInfo
from headrace.server.client import Phase
from headrace.server.expert_metrics import expert_memory
from headrace.server.services import Services


def status_router(services: Services) -> APIRouter:
    """Return the routes, bound to ``services``."""
    router = APIRouter()

    # Monitors and containers' health checks (wget --spider) ask for the head alone.
    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        info, _ = services.ready()
        ids = services.model_ids(info)
        return {"object": "list", "data": [_model(i, info, services.created) for i in ids]}

    @router.get("/v1/models/{model_id:path}")  # hub ids hold a slash
    async def model(model_id: str) -> dict[str, Any]:
        info, _ = services.ready()
        ids = services.model_ids(info)
        if model_id not in ids:
            raise ModelNotFoundError(
                f"the model {model_id[:80]!r} is not served here; served: {', '.join(ids)}",
                hint="GET /v1/models lists the names",
                param="model",
            )
        return _model(model_id, info, services.created)

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> JSONResponse:
        status, body = _health(services)
        return JSONResponse(body, status_code=status)

    @router.get("/metrics")
    async def metrics() -> Response:
        text = services.metrics.render(
            services.client.snapshot,
            services.client.state,
            services.client.info,
            stuck=services.stuck,
        )
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _model(model_id: str, info: EngineInfo, created: int) -> dict[str, Any]:
    # The context's length stands under each name that clients look for.
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "max_model_len": info.context,
        "context_length": info.context,
        "meta": {"n_ctx": info.context, "n_vocab": info.vocab, "size": info.weights_nbytes},
        "input_modalities": ["text"],
        "output_modalities": ["text"],
    }


def _health(services: Services) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body: 200 only when a request would be served now."""
    state, info = services.client.state, services.client.info
    if state.phase is Phase.DEAD:
        error = state.error
        return 503, {
            "status": "dead",
            "error": None if error is None else error.message,
            "hint": None if error is None else error.hint,
        }
    if state.phase is Phase.LOADING or info is None or services.frontend is None:
        stage = state.stage if state.phase is Phase.LOADING else "tokenizer"
        return 503, {"status": "loading", "stage": stage, "fraction": round(state.fraction, 4)}
    if services.stuck:
        return 503, {"status": "stuck", "silent_s": round(services.client.silent_s, 1)}
    snapshot = services.client.snapshot
    experts = snapshot.experts
    return 200, {
        "status": "ok",
        "model": services.model_ids(info)[0],
        "family": info.family,
        "context": info.context,
        "kv_format": info.kv_format,
        "threads": info.threads,
        # The numbers and names of headrace_memory_bytes and headrace_expert_memory_bytes in /metrics.
        "memory_nbytes": info.memory,
        "expert_memory_nbytes": None if experts is None else expert_memory(experts),
        "choices": [{"name": c.name, "value": c.value, "reason": c.reason} for c in info.choices],
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "kv_blocks": {
            "total": snapshot.kv_blocks_total,
            "used": snapshot.kv_blocks_used,
            "cached": snapshot.kv_blocks_cached,
        },
    }
