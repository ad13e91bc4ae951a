"""``POST /api/pull``: fetches a model to this PC, with progress as Ollama's clients expect it.

It needs the owner's token. A model that the swarm serves is there already, for any client.
"""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web
from msgspec import json

from molink.errors import ModelNotFound, RequestError, Unavailable
from molinkd.api.access_guard import require_owner
from molinkd.api.administration import Administration
from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import json_response
from molinkd.api.line_stream import stream_lines
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.ollama.encoder import encode_envelope
from molinkd.api.ollama.schema import PullRequest

#: Ollama's names of the hub, in front of ``OWNER/NAME``.
_HUB_PREFIXES = ("hf.co/", "huggingface.co/")
_SUCCESS = json.encode({"status": "success"})


@dataclass(frozen=True, slots=True)
class PullRoute:
    """``/api/pull``."""

    administration: Administration
    body_reader: BodyReader
    catalog: ModelCatalog
    stall_timeout_s: float

    @property
    def routes(self) -> list[web.RouteDef]:
        """The route."""
        return [web.post("/api/pull", self.pull_model)]

    async def pull_model(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/pull``: fetch a model to this PC (for its owner)."""
        body = await self.body_reader.decode_request(request, PullRequest)
        if body.served_name is None:
            raise RequestError("`model`: required", "model")
        served = self._is_served(body.served_name)
        if not served:
            require_owner(request)
        lines = self._encode_progress(_hub_name(body.served_name), served=served)
        if body.stream is not False:
            return await stream_lines(request, lines, self.stall_timeout_s, encode_envelope)
        async with aclosing(lines):
            async for _ in lines:
                pass
        return json_response(_SUCCESS)

    def _is_served(self, name: str) -> bool:
        try:
            self.catalog.find_model(name)
        except (ModelNotFound, Unavailable):
            return False
        return True

    async def _encode_progress(self, model: str, *, served: bool) -> AsyncGenerator[bytes, None]:
        if not served:
            # Clients tell transfers apart by a digest; a model's files are one transfer here.
            digest = f"sha256:{hashlib.sha256(model.encode()).hexdigest()}"
            status = f"pulling {digest[7:19]}"
            async with aclosing(self.administration.pull_model(model)) as progress:
                async for one in progress:
                    line: dict[str, object] = {"status": "pulling manifest"}
                    if one.total:
                        sizes = {"total": one.total, "completed": one.done}
                        line = {"status": status, "digest": digest, **sizes}
                    yield json.encode(line)
        yield _SUCCESS


def _hub_name(model: str) -> str:
    for prefix in _HUB_PREFIXES:
        model = model.removeprefix(prefix)
    return model
