"""``/openapi.json``: the routes and their bodies, as msgspec describes them."""

from functools import cache
from typing import Any

import msgspec
from aiohttp import web
from msgspec import json

import molink
from molinkd.api.access_guard import PAGE_PREFIX
from molinkd.api.anthropic.schema import CountTokensRequest, MessageRequest
from molinkd.api.ollama.schema import (
    ChatRequest,
    GenerateRequest,
    ModelReference,
    PullRequest,
)
from molinkd.api.openai.schema import ChatBody, CompletionBody
from molinkd.api.owner_routes import DrainBody, ModelBody, PairingBody, SettingBody
from molinkd.api.pooling.schema import (
    EmbeddingBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    RerankBody,
)
from molinkd.api.responses.schema import ResponseRequest

#: The body of each ``POST`` route.
REQUEST_BODIES: dict[str, type[msgspec.Struct]] = {
    **dict.fromkeys(("/v1/chat/completions", "/api/v0/chat/completions"), ChatBody),
    **dict.fromkeys(("/v1/completions", "/api/v0/completions"), CompletionBody),
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/api/chat": ChatRequest,
    "/api/generate": GenerateRequest,
    "/api/show": ModelReference,
    "/api/pull": PullRequest,
    "/swarm/settings": SettingBody,
    "/swarm/pairing": PairingBody,
    "/swarm/drain": DrainBody,
    "/swarm/serve": ModelBody,
    "/swarm/stop": ModelBody,
    **dict.fromkeys(("/v1/embeddings", "/api/v0/embeddings"), EmbeddingBody),
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbeddingsBody,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankBody),
}
_REFERENCE = "#/components/schemas/{name}"


class OpenAPIRoute:
    """``/openapi.json``."""

    @property
    def routes(self) -> list[web.RouteDef]:
        """The route."""
        return [web.get("/openapi.json", self.get_document)]

    async def get_document(self, request: web.Request) -> web.Response:
        """The API description (OpenAPI 3.1)."""
        return web.Response(body=encode_document(request.app), content_type="application/json")


def encode_document(app: web.Application) -> bytes:
    """Describe the routes of ``app`` as an OpenAPI document (JSON)."""
    return _encode_routes(
        tuple(
            (route.method.lower(), route.resource.canonical, route.handler.__doc__ or "")
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
            if not route.resource.canonical.startswith(PAGE_PREFIX)
        )
    )


@cache
def _encode_routes(routes: tuple[tuple[str, str, str], ...]) -> bytes:
    kinds = list(dict.fromkeys(REQUEST_BODIES.values()))
    schemas, components = json.schema_components(kinds, ref_template=_REFERENCE)
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, about in routes:
        operation: dict[str, Any] = {
            "summary": about.strip().splitlines()[0],
            "responses": {
                "200": {"description": "The answer, or a stream if requested."},
                "default": {"description": "An error in the format of the route's protocol."},
            },
        }
        if method == "post" and path in REQUEST_BODIES:
            content = {"application/json": {"schema": by_kind[REQUEST_BODIES[path]]}}
            operation["requestBody"] = {"required": True, "content": content}
        if "{name}" in path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(path, {})[method] = operation
    key = {"type": "http", "scheme": "bearer"}
    return json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "molink", "version": molink.__version__},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": key}},
            "security": [{}, {"key": []}],
        }
    )
