"""The routes with which the chat page changes the swarm and this PC; all need the owner's token."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import json

from molink.plaintext import sanitize_text
from molink.sim.swarm_capacity import read_capacity
from molink.swarm.controller.status_schema import decode_status
from molinkd.api.access_guard import require_owner
from molinkd.api.administration import Administration, LocalModel
from molinkd.api.backend import Backend
from molinkd.api.body_reader import BodyReader
from molinkd.api.catalog_fits import CatalogFits, CatalogModel, choose_offers
from molinkd.api.generation_handler import json_response
from molinkd.api.line_stream import stream_lines

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
_DONE = json.encode({"status": "done"})


class PairingBody(msgspec.Struct, kw_only=True):
    """``POST /swarm/pairing``: the ``code`` that the other PC shows."""

    code: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    approve: bool


class DrainBody(msgspec.Struct, kw_only=True):
    """``POST /swarm/drain``."""

    drained: bool


class ModelBody(msgspec.Struct, kw_only=True):
    """``POST /swarm/serve`` and ``/swarm/stop``: as ``molink run`` and ``molink stop``."""

    model: _Name


class SettingBody(msgspec.Struct, kw_only=True):
    """``POST /swarm/settings``; an empty ``value`` forgets the change."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    value: Annotated[str, msgspec.Meta(max_length=1024)]


class ModelsAnswer(msgspec.Struct, frozen=True):
    """``GET /swarm/models``: ``offers`` are names in ``catalog`` to begin with."""

    local: tuple[LocalModel, ...]
    catalog: tuple[CatalogModel, ...]
    offers: tuple[str, ...]
    memory: int


@dataclass(frozen=True, slots=True)
class OwnerRoutes:
    """``/swarm/…``: pairing, draining, models and settings."""

    backend: Backend
    administration: Administration
    body_reader: BodyReader
    stall_timeout_s: float
    catalog_fits: CatalogFits = field(default_factory=CatalogFits)

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/swarm/models", self.list_models),
            web.get("/swarm/settings", self.list_settings),
            web.post("/swarm/settings", self.change_setting),
            web.post("/swarm/pairing", self.decide_pairing),
            web.post("/swarm/drain", self.drain_pc),
            web.post("/swarm/serve", self.serve_model),
            web.post("/swarm/stop", self.stop_model),
        ]

    async def list_models(self, request: web.Request) -> web.Response:
        """``GET /swarm/models``: this PC's models and the catalog's (for its owner)."""
        require_owner(request)
        local = tuple(await self.administration.list_local_models())
        status = decode_status(await self.backend.fetch_status())
        capacity = read_capacity(status, self.administration.quantize)
        found = await self.catalog_fits.describe_models(capacity)
        offers = choose_offers(found, capacity.quantize)
        answer = ModelsAnswer(local, found, offers, capacity.memory)
        return json_response(json.encode(answer))

    async def list_settings(self, request: web.Request) -> web.Response:
        """``GET /swarm/settings``: settings of this PC that are safe to change (for its owner)."""
        require_owner(request)
        return json_response(json.encode(await self.administration.list_settings()))

    async def change_setting(self, request: web.Request) -> web.Response:
        """``POST /swarm/settings``: change one from the next start on (for the owner)."""
        require_owner(request)
        body = await self.body_reader.decode_request(request, SettingBody)
        await self.administration.change_setting(body.name, body.value)
        return json_response(_DONE)

    async def decide_pairing(self, request: web.Request) -> web.Response:
        """``POST /swarm/pairing``: approve or refuse a PC (for the owner)."""
        require_owner(request)
        body = await self.body_reader.decode_request(request, PairingBody)
        name = await self.administration.decide_pairing(body.code, refuse=not body.approve)
        return json_response(json.encode({"name": sanitize_text(name)}))

    async def drain_pc(self, request: web.Request) -> web.Response:
        """``POST /swarm/drain``: drain or resume this PC (for its owner)."""
        require_owner(request)
        body = await self.body_reader.decode_request(request, DrainBody)
        await self.administration.set_drained(body.drained)
        return json_response(_DONE)

    async def stop_model(self, request: web.Request) -> web.Response:
        """``POST /swarm/stop``: unload a model (for the owner)."""
        require_owner(request)
        body = await self.body_reader.decode_request(request, ModelBody)
        await self.administration.stop_model(body.model)
        return json_response(_DONE)

    async def serve_model(self, request: web.Request) -> web.StreamResponse:
        """``POST /swarm/serve``: serve a model, with progress as JSON lines (for the owner)."""
        require_owner(request)
        body = await self.body_reader.decode_request(request, ModelBody)
        lines = self._encode_progress(body.model)
        return await stream_lines(request, lines, self.stall_timeout_s)

    async def _encode_progress(self, model: str) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.administration.serve_model(model)) as progress:
            async for one in progress:
                yield json.encode(one)
