"""Rejects embedding requests with a clear error, since no served model supports them."""

from typing import Any

import msgspec
from aiohttp import web

from molink.errors import RequestError
from molinkd.api.body_reader import BodyReader
from molinkd.api.openai_schema import decode_struct


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``, and Ollama's."""

    model: str | None = None
    input: Any = None
    prompt: Any = None


class EmbeddingRoutes:
    """``/v1/embeddings``, ``/api/embed``, ``/api/embeddings``."""

    def __init__(self, bodies: BodyReader) -> None:
        self._body_reader = bodies

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        paths = ("/v1/embeddings", "/api/embed", "/api/embeddings")
        return [web.post(path, self.refuse_embeddings) for path in paths]

    async def refuse_embeddings(self, request: web.Request) -> web.Response:
        """Embeddings; not supported."""
        body = decode_struct(await self._body_reader.read_body(request), EmbeddingRequest)
        raise RequestError(
            f"`model`: {(body.model or 'this model')[:128]} does not support embeddings; "
            "molink serves text generation only",
            "model",
        )
