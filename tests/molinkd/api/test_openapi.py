"""``/openapi.json`` describes the routes."""

from typing import Any

import jsonschema
import pytest
from aiohttp.test_utils import TestClient

from molink.checkpoint.model_task import ModelTask
from molinkd.api.access_guard import PAGE_PREFIX
from molinkd.api.openapi import REQUEST_BODIES
from tests.support.fake_backend import FakeBackend

HI = [{"role": "user", "content": "hi"}]
#: A valid body for each route; routes that are missing here reject all.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "stop": ["x"], "max_tokens": -1},
    "/v1/completions": {"prompt": ["a", [97]], "best_of": 2},
    "/v1/responses": {
        "input": [{"role": "user", "content": "hi"}],
        "text": {"format": {"type": "json_object"}},
        "tools": [],
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 9,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {
        "messages": HI,
        "options": {"num_predict": 3},
        "think": "low",
        "format": {"type": "object"},
    },
    "/api/generate": {"prompt": "hi", "keep_alive": "5m"},
    "/api/show": {"model": "tiny"},
}
#: Valid bodies for the routes of embedding models.
EMBED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", [97]], "encoding_format": "base64", "dimensions": 3},
    "/api/embed": {"input": ["a"], "truncate": False, "keep_alive": 5},
    "/api/embeddings": {"prompt": "a", "options": {"priority": 1}},
}
RERANK = {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"temperature": 3}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"stop": ["x"] * 17}),
    ("/v1/responses", {"input": None}),
    ("/v1/messages", {"max_tokens": "9"}),
    ("/v1/messages", {"tool_choice": {"type": "some"}}),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}),
    ("/api/chat", {"format": "xml"}),
    ("/api/chat", {"options": {"num_predict": 1.5}}),
    ("/api/show", {"model": 5}),
]


@pytest.fixture
async def document(client: TestClient) -> dict[str, Any]:
    return await (await client.get("/openapi.json")).json()


def schema_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return {**content["application/json"]["schema"], "components": document["components"]}


async def test_every_route_is_documented(client: TestClient, document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            assert ("requestBody" in operation) == (method == "post"), path
            address = path.replace("{name}", "tiny")
            response = await client.request(method, address, json={} if method == "post" else None)
            assert response.status in (200, 400, 403), path
    assert set(REQUEST_BODIES) <= set(document["paths"])
    routes = {
        route.resource.canonical
        for route in client.app.router.routes()  # type: ignore[union-attr]
        if route.resource is not None and not route.resource.canonical.startswith(PAGE_PREFIX)
    }
    assert routes == set(document["paths"])


@pytest.mark.parametrize("path", GOOD)
async def test_documented_bodies_are_accepted(
    client: TestClient, document: dict[str, Any], path: str
) -> None:
    jsonschema.Draft202012Validator(schema_of(document, path)).validate(GOOD[path])
    assert (await client.post(path, json=GOOD[path])).status == 200


@pytest.mark.parametrize(("path", "change"), BAD)
async def test_undocumented_bodies_are_rejected(
    client: TestClient, document: dict[str, Any], path: str, change: dict[str, Any]
) -> None:
    body = {**GOOD[path], **change}
    assert not jsonschema.Draft202012Validator(schema_of(document, path)).is_valid(body)
    assert (await client.post(path, json=body)).status == 400


@pytest.mark.parametrize("path", [*EMBED, "/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documented_bodies_of_pooling_models(
    client: TestClient, document: dict[str, Any], backend: FakeBackend, path: str
) -> None:
    backend.task = ModelTask("embed") if path in EMBED else ModelTask("rerank", 5, 7)
    backend.hidden_size = 4
    body = EMBED.get(path, RERANK)
    jsonschema.Draft202012Validator(schema_of(document, path)).validate(body)
    assert (await client.post(path, json=body)).status == 200
