"""docs/reference/http-api.md names every field, route and metric that there is."""

from __future__ import annotations

from pathlib import Path

from headrace.core.status import EngineSnapshot
from headrace.server import schema
from headrace.server.app import create_app
from headrace.server.client import EngineState, Phase
from headrace.server.metrics import Metrics
from tests.fixtures.scripted import ByteFrontend, ScriptedClient

DOC = (Path(__file__).parents[2] / "docs/reference/http-api.md").read_text(encoding="utf-8")


def test_every_field_is_documented():
    models = (
        schema.ChatRequest,
        schema.CompletionRequest,
        schema.TokenizeRequest,
        schema.DetokenizeRequest,
        schema.StreamOptions,
    )
    names = {name for model in models for name in model.model_fields}
    names |= {*schema.METADATA_FIELDS, *schema.UNSUPPORTED}
    assert {n for n in names if f"`{n}`" not in DOC and f'"{n}"' not in DOC} == set()


def test_every_route_is_documented():
    app = create_app(ScriptedClient(lambda r: []), ByteFrontend())
    paths = {p.replace("{model_id}", "{id}") for p in app.openapi()["paths"]}
    assert "/v1/chat/completions" in paths
    assert {p for p in paths if f" {p}`" not in DOC} == set()


def test_every_metric_is_documented():
    metrics = Metrics()
    metrics.render(EngineSnapshot(requests_finished={"stop": 1}), EngineState(Phase.READY))
    names = set()
    for family in metrics.registry.collect():
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    assert len(names) > 15
    assert {n for n in names if f"`{n}`" not in DOC and f"`{n}{{reason}}`" not in DOC} == set()
