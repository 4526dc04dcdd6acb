"""docs/reference/http-api.md names every field, route and metric that there is."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.core.status import EngineSnapshot, ExpertSnapshot
from headrace.server import schema
from headrace.server.app import create_app
from headrace.server.client import EngineState, Phase
from headrace.server.metrics import Metrics
from tests.fixtures.scripted import ByteFrontend, ScriptedClient, toy_info

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
    snapshot = EngineSnapshot(
        requests_finished={"stop": 1},
        experts=ExpertSnapshot(bytes_total={"fetched": 1}, split=(0, 1), rates_gbps={"cpu": 1.0}),
    )
    metrics.render(snapshot, EngineState(Phase.READY), toy_info())
    names = set()
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {k for s in family.samples for k in s.labels if k != "le"}
        names.add((name, tuple(sorted(labels))))
    assert len(names) > 25
    documented = set(re.findall(r"`(headrace_[a-z_]+)(?:{([a-z,]+)})?`", DOC))
    found = {(name, tuple(sorted(filter(None, labels.split(","))))) for name, labels in documented}
    assert names - found == set()
