"""Embeddings: refused in a way that says so, as no model that is served makes any."""

from typing import Any

import msgspec
from aiohttp import web

from molink.errors import RequestError
from molinkd.api.body import Bodies
from molinkd.api.schema import decode_struct


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``, and Ollama's."""

    model: str | None = None
    input: Any = None
    prompt: Any = None


class EmbeddingRoutes:
    """``/v1/embeddings``, ``/api/embed``, ``/api/embeddings``."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies

    @property
    def table(self) -> list[web.RouteDef]:
        """All routes."""
        paths = ("/v1/embeddings", "/api/embed", "/api/embeddings")
        return [web.post(path, self.refuse) for path in paths]

    async def refuse(self, request: web.Request) -> web.Response:
        """Embeddings, which are not made here."""
        body = decode_struct(await self._bodies.read(request), EmbeddingRequest)
        raise RequestError(
            f"`model`: {(body.model or 'what is served')[:128]} makes no embeddings; molink serves "
            "models that generate text only",
            "model",
        )
