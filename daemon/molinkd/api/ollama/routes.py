"""The handlers of Ollama's routes."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from msgspec import json

from molink.checkpoint.fields import read_bytes
from molink.errors import MolinkError, RequestError
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.body import Bodies
from molinkd.api.catalogue import Catalogue
from molinkd.api.formats import Format
from molinkd.api.generator import ClientRequest, Generator, json_answer
from molinkd.api.offered_tools import abilities
from molinkd.api.ollama.formats import OllamaFormat, now
from molinkd.api.ollama.schema import NAMES, ChatRequest, GenerateRequest, Named
from molinkd.api.request_plan import Plan
from molinkd.api.schema import ChatBody, decode_struct

#: The version of Ollama whose routes these are: clients look whether it has what they need.
VERSION = "0.12.0"
#: Until when a model stays: until it is told to go, which clients want as a date.
_FOR_EVER = "2318-01-01T00:00:00Z"


class OllamaRoutes:
    """``/api/chat``, ``generate``, ``tags``, ``show``, ``ps``, ``version``."""

    def __init__(
        self, backend: Backend, bodies: Bodies, catalogue: Catalogue, generator: Generator
    ) -> None:
        self._backend = backend
        self._bodies = bodies
        self._catalogue = catalogue
        self._generator = generator

    @property
    def table(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.post("/api/chat", self.chat),
            web.post("/api/generate", self.generate),
            web.get("/api/tags", self.tags),
            web.post("/api/show", self.show),
            web.get("/api/ps", self.running),
            web.get("/api/version", self.version),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/chat``."""
        body = decode_struct(await self._bodies.read(request), ChatRequest)

        def form(plan: Plan) -> Format:
            return OllamaFormat(plan, chat=True)

        asked = body.as_openai()
        if not body.messages:
            return await self._loaded(body, {"message": {"role": "assistant", "content": ""}})
        ask = ClientRequest(asked, form, body.stream is not False, names=NAMES)
        return await self._generator.answer(request, ask)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/generate``."""
        body = decode_struct(await self._bodies.read(request), GenerateRequest)
        asked = body.as_openai()

        def form(plan: Plan) -> Format:
            return OllamaFormat(plan, chat=False)

        if not body.prompt:
            return await self._loaded(body, {"response": ""})
        names = NAMES | ({"messages": "prompt"} if isinstance(asked, ChatBody) else {})
        ask = ClientRequest(asked, form, body.stream is not False, names=names)
        return await self._generator.answer(request, ask)

    async def tags(self, request: web.Request) -> web.Response:
        """``GET /api/tags``: all models."""
        models = [await _shown(model) for model in self._backend.models()]
        return json_answer(json.encode({"models": models}))

    async def running(self, request: web.Request) -> web.Response:
        """``GET /api/ps``: those that can be asked now."""
        ready = [model for model in self._backend.models() if self._backend.ready(model.name)]
        models = [
            {**await _shown(model), "expires_at": _FOR_EVER, "context_length": model.context}
            for model in ready
        ]
        return json_answer(json.encode({"models": models}))

    async def show(self, request: web.Request) -> web.Response:
        """``POST /api/show``."""
        body = decode_struct(await self._bodies.read(request), Named)
        if body.asked is None:
            raise RequestError("`model`: required, but missing", "model")
        offer = await self._catalogue.offer(body.asked)
        model, template = offer.model, offer.tokenizer.template
        shown = await _shown(model)
        family = shown["details"]["family"]
        found = {
            "modelfile": "",
            "parameters": "",
            "template": "" if template is None else template.source,
            "details": shown["details"],
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": model.context,
            },
            "capabilities": ["completion", *abilities(offer)],
            "modified_at": shown["modified_at"],
        }
        return json_answer(json.encode(found))

    async def version(self, request: web.Request) -> web.Response:
        """``GET /api/version``."""
        return json_answer(json.encode({"version": VERSION}))

    async def _loaded(
        self, body: ChatRequest | GenerateRequest, said: dict[str, Any]
    ) -> web.Response:
        """What a client is told that only wants the model loaded, or unloaded: it stays."""
        offer = await self._catalogue.offer(body.asked)
        reason = "unload" if body.keep_alive in (0, "0", "0s", "0m", "0h") else "load"
        found = {"model": offer.model.name, "created_at": now(), **said}
        return json_answer(json.encode({**found, "done": True, "done_reason": reason}))


async def _shown(model: ServedModel) -> dict[str, Any]:
    """A model as ``/api/tags`` lists it."""
    family = await asyncio.to_thread(_family, model)
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "size": model.size,
        "digest": model.root.partition(":")[0],
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _family(model: ServedModel) -> str:
    """The architecture that the model's config names."""
    try:
        config = json.decode(read_bytes(model.folder / "config.json"), type=dict[str, Any])
    except (MolinkError, OSError, ValueError):
        return "unknown"
    return str(config.get("model_type", "unknown"))
